"""What an engine's log says about its death."""

from __future__ import annotations

import pytest

from bidikv_server.launch.diagnosis import explain_death


@pytest.mark.parametrize(
    ("log", "exit_code", "expected"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", 1, "pip uninstall -y torchvision"),
        ("ModuleNotFoundError: No module named 'vllm'", 1, "bidikv[cpu]"),
        ("OSError: [Errno 98] Address already in use", 1, "start again"),
        ("api_server.py: error: unrecognized arguments: --typo", 2, "after `--`"),
        ("RuntimeError: Cannot find any model weights with `x`", 1, "complete Hugging Face checkpoint"),
        (
            "(EngineCore) Traceback\nValueError: the cause\nRuntimeError: Engine core initialization failed. See above.",
            1,
            "vLLM says: ValueError: the cause.",
        ),
        ("", -9, "memory"),
        ("something new", 1, "bidikv doctor"),
    ],
)
def test_names_the_fix(log, exit_code, expected):
    """A known cause gets its own fix, an unknown one the next thing to try."""
    assert expected in explain_death(log, exit_code)
