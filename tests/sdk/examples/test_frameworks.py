"""The examples of frameworks that are not installed; with them, tests/sdk/integrations runs the examples."""

from __future__ import annotations

import sys

import pytest

from bidikv.examples import (
    crewai_crew,
    google_adk_agent,
    llama_index_agent,
    openai_agents_agent,
    pydantic_ai_agent,
)

EXAMPLES = [
    (crewai_crew, "crewai", "crewai"),
    (google_adk_agent, "google_adk", "google.adk"),
    (llama_index_agent, "llama_index", "llama_index"),
    (openai_agents_agent, "openai_agents", "agents"),
    (pydantic_ai_agent, "pydantic_ai", "pydantic_ai"),
]


@pytest.mark.parametrize(("module", "integration", "package"), EXAMPLES)
def test_without_the_framework(module, integration, package, capsys, monkeypatch):
    """The program names the extra that brings it."""
    monkeypatch.delitem(sys.modules, f"bidikv.integrations.{integration}", raising=False)
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert module.main(["--model", "m"]) == 2
    extra = integration.replace("_", "-")
    assert f'pip install "bidikv[{extra}]"' in capsys.readouterr().err


@pytest.mark.parametrize("module", [example[0] for example in EXAMPLES])
def test_no_comparison(module, capsys):
    """These examples play once; the option is not there to be ignored."""
    with pytest.raises(SystemExit):
        module.main(["--model", "m", "--compare"])
    assert "--compare" in capsys.readouterr().err
