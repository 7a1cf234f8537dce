# Everything runs from .venv, which `setup` makes once and keeps until pyproject.toml changes.
#
# The CPU build of torch is not on the default index. Where pip is not set up to find it, point it at PyTorch's own
# index of CPU wheels:  PIP_EXTRA_INDEX_URL=<that index> make setup
# On a machine with a GPU:  make setup EXTRAS=gpu,dev

PYTHON ?= python3.11
EXTRAS ?= cpu,dev
BIN    := .venv/bin
STAMP  := .venv/.installed-$(shell { cat pyproject.toml; echo "$(EXTRAS)"; } | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint type clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv and install everything (once)

$(STAMP):
	@PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" STAMP="$(STAMP)" scripts/setup.sh

demo: $(STAMP)  ## Measure what readback saves, on real engines (QUICK=1 for the short run)
	@mkdir -p demo
	@$(BIN)/bidikv demo --json demo/result.json --plot demo/ttft.png $(if $(QUICK),--quick) $(ARGS)

test: lint type  ## Lint, types and all tests: unit, contract, real engines
	scripts/services.sh redis chromium
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## Ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)  ## Mypy, strict
	scripts/link_types.sh
	$(BIN)/mypy -p bidikv -p bidikv_server
	$(BIN)/mypy tests/typing

clean:  ## Remove what builds and tests leave behind (.venv stays)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info bidikv-logs
	find sdk server examples tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
