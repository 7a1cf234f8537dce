"""Fixtures of the connector's tests."""

import socket

import pytest


@pytest.fixture
def free_port():
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
