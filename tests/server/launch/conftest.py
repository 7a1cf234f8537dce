"""Shared by the launcher's tests: the prepared model, and a stand-in for vLLM that starts in milliseconds."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bidikv_server.launch.model import prepare_smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKE_VLLM = Path(__file__).parent / "fake_vllm"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The small real model, converted once per machine."""
    return prepare_smollm2()


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `python -m vllm...` in child processes run the stand-in."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(FAKE_VLLM), os.environ.get("PYTHONPATH")]))
    )
    return FAKE_VLLM


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
