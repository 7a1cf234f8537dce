"""Ends the launcher's process groups when the launcher is gone, however it went.

The parent-death signal alone is not enough: it reaches an engine's API server, not the engine core behind it, and
not a server that is still loading. So one small process, in a session of its own, reads a pipe from the launcher:
`+ID` and `-ID` lines add and remove a group. When the pipe ends, it ends the groups that are left.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Final

from bidikv_server.launch.groups import end_groups

if TYPE_CHECKING:
    from collections.abc import Iterable

_GRACE_S: Final = 5.0


def watch(lines: Iterable[str]) -> set[int]:
    """Follow the pipe to its end; return the groups that nobody took off the list."""
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    return groups


def main() -> None:
    """Wait for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_groups(sorted(watch(sys.stdin)), _GRACE_S)


if __name__ == "__main__":
    main()
