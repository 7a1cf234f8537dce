"""Process groups on Linux: who is still in one, and how to end all of it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.05


def group_members(group: int) -> list[int]:
    """Pids that live in a process group; zombies are not counted, nobody may ever reap them."""
    return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _lives_in(stat, group)]


def _lives_in(stat: Path, group: int) -> bool:
    try:
        # The command's name, in parentheses, may hold anything.
        fields = stat.read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return int(fields[2]) == group and fields[0] not in {b"Z", b"X"}


def end_groups(groups: list[int], grace_s: float) -> None:
    """Ask every process of these groups to end, and kill what is left after `grace_s`.

    The caller reaps its own children; a group leader that nobody reaps stays a zombie.
    """
    for group in groups:
        _signal_group(group, signal.SIGTERM)
    left = _wait_until_empty(groups, grace_s)
    for group in left:
        _signal_group(group, signal.SIGKILL)
    _wait_until_empty(left, grace_s)


def kill_groups(groups: list[int], timeout_s: float) -> None:
    """Kill every process of these groups, as a crash would, and wait until they are gone."""
    for group in groups:
        _signal_group(group, signal.SIGKILL)
    _wait_until_empty(groups, timeout_s)


def _wait_until_empty(groups: list[int], timeout_s: float) -> list[int]:
    deadline_s = time.monotonic() + timeout_s
    while left := [group for group in groups if group_members(group)]:
        if time.monotonic() >= deadline_s:
            break
        time.sleep(_POLL_S)
    return left


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
