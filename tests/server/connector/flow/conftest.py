"""Pairs of engines: vLLM's real scheduler, block pool and connector scheduler side; no model and no process."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parents[3] / "doubles"))

from engine_core import Pair, unused_port, write_model

from bidikv_server.connector import side_channel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A model's configuration."""
    return write_model(tmp_path_factory.mktemp("flow") / "tiny-llama")


@pytest.fixture(autouse=True)
def quick_to_stop(monkeypatch):
    """An index thread looks up from its socket twice a second; tests start and stop many."""
    monkeypatch.setattr(side_channel, "_STOP_POLL_MS", 5)


@pytest.fixture
def start(checkpoint):
    """Start a pair of engines; `stock=True` for vLLM's own connector."""
    pairs = []

    def start(*, host="127.0.0.1", **settings):
        pairs.append(Pair(checkpoint, port=unused_port(host), host=host, **settings))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()
