"""Shared by the tests of deploy/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from deployed import BASE, VARIABLES, documents


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """The file of API keys that the Secret's template would mount."""
    (secret,) = documents(BASE / "secret.example.yaml")
    path = tmp_path / "keys.toml"
    path.write_text(secret["stringData"]["keys.toml"])
    return path


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No setting leaks in from outside."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch
