"""Finds free TCP ports, and says who holds one that is not free."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from bidikv_server.launch.errors import LaunchError, PortInUseError

# Below Linux's ephemeral range: an engine binds half a minute after its port was chosen, and until then no
# outgoing connection may take it. In steps: a data-parallel engine takes the following ports too, one for each rank.
_CHOICES: Final = range(20000, 32000, 8)
_LISTEN: Final = "0A"


def http_url(host: str, port: int) -> str:
    """The base URL of a server there; an IPv6 address needs brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Choose different ports that nothing listens on now.

    Raises:
        LaunchError: There are not that many.
    """
    chosen: list[int] = []
    for port in random.sample(_CHOICES, len(_CHOICES)):
        if len(chosen) == count:
            break
        if is_free(host, port):
            chosen.append(port)
    if len(chosen) < count:
        raise LaunchError(f"only {len(chosen)} of {count} ports are free between 20000 and 32000 on {host}")
    return chosen


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_free(host: str, port: int, option: str = "--port") -> None:
    """Check a port that the user asked for.

    Raises:
        PortInUseError: It is taken; the message names the holder where /proc tells.
    """
    if is_free(host, port):
        return
    holder = port_holder(port)
    by = f" by {holder}" if holder else ""
    raise PortInUseError(
        f"port {port} on {host} is in use{by}. Stop that process or choose another {option}."
    )


def port_holder(port: int) -> str | None:
    """`pid 123 (command line)` of the process that listens on a port, where we may see it."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & _open_files(process):
            return f"pid {process.name} ({_command_line(process)[:80]})"
    return None


def _open_files(process: Path) -> set[str]:
    targets = set()
    with suppress(OSError):  # Ended meanwhile, or another user's.
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                targets.add(str(descriptor.readlink()))
    return targets


def _command_line(process: Path) -> str:
    try:
        return " ".join((process / "cmdline").read_bytes().decode(errors="replace").split("\0")).strip()
    except OSError:
        return "ended"


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found
