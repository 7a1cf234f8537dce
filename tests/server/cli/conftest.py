"""Shared by the command line's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FAKE_VLLM = Path(__file__).parent.parent / "launch" / "fake_vllm"


@pytest.fixture
def fake_vllm_env() -> dict[str, str]:
    """An environment in which `python -m vllm...` is a stand-in that starts in milliseconds."""
    return {**os.environ, "PYTHONPATH": str(FAKE_VLLM), "NO_COLOR": "1"}
