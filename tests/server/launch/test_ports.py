"""Free ports and their holders."""

from __future__ import annotations

import itertools
import os

import pytest

from bidikv_server.launch.errors import PortInUseError
from bidikv_server.launch.ports import free_ports, is_free, port_holder, require_free


def test_free_ports_are_different_and_free():
    """As many as were asked for, outside the range of outgoing connections."""
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert all(is_free("127.0.0.1", port) and 20000 <= port < 32000 for port in ports)


def test_ports_leave_room_for_data_parallel_ranks():
    """Each rank after the first takes the next port: none of those is another engine's."""
    ports = sorted(free_ports(40))
    assert all(after - before >= 8 for before, after in itertools.pairwise(ports))


def test_a_taken_port_is_refused_with_its_holder(taken_port):
    """The message names the process, the port and the option to change."""
    with pytest.raises(PortInUseError, match=rf"port {taken_port} .*pid {os.getpid()} .*--nixl-port"):
        require_free("127.0.0.1", taken_port, "--nixl-port")


def test_the_holder_is_found_through_proc(taken_port):
    """The listening process is named by pid and command line."""
    assert (port_holder(taken_port) or "").startswith(f"pid {os.getpid()} (")


def test_a_free_port_has_no_holder():
    """And is accepted without a word."""
    port = free_ports(1)[0]
    require_free("127.0.0.1", port)
    assert port_holder(port) is None
