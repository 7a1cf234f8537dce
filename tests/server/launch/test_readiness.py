"""Readiness over HTTP."""

from __future__ import annotations

import pytest

from bidikv_server.launch.ports import free_ports
from bidikv_server.launch.readiness import (
    find_index_address,
    index_address,
    is_healthy,
    router_is_ready,
    sees_all,
)


def test_finds_the_index_among_other_metrics():
    """The address is read from the labels of the one metric that carries it."""
    page = '# TYPE x gauge\nvllm:x{a="b"} 1\nbidikv:index_info{address="h:1",engine="0",engine_id="e"} 1.0\n'
    assert find_index_address(page) == "h:1"
    assert find_index_address("vllm:x 1\n") is None


def test_nobody_there_is_not_ready():
    """A refused connection is an answer, not an error."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    assert not is_healthy(url)
    assert index_address(url) is None
    assert not router_is_ready(url, 0, 0)


@pytest.mark.parametrize(
    ("engines", "indexes", "expected"), [(1, 0, True), (2, 0, False), (1, 1, True), (1, 2, False)]
)
def test_a_router_is_ready_when_it_sees_every_engine_and_index(engines, indexes, expected):
    """One that has just lost an engine, or does not know an index yet, would measure something else."""
    health = {
        "prefill": [{"url": "http://p:1", "healthy": False}],
        "decode": [{"url": "http://d:1", "healthy": True, "index": ["d:2"]}],
    }
    assert sees_all(health, engines, indexes) is expected
