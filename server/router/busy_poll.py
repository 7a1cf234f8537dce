"""Keeps the router's core from sleeping between packets: a core that has gone idle takes its time over the next one.

An event loop that has nothing to do sleeps, and lets its core sleep too. To wake it takes longer than a packet's way, and the code
that runs then is found in no cache: a step of a turn takes two to three times as long as the same step without the sleep
before it, on a virtual machine more (docs/design/0006-upstream-client.md). With this the loop goes on looking for packets for a
while after each one, which is what Seastar's `idle-poll-time-us` and DPDK's poll mode do. The price is processor time
that nothing is done with, one core's at most, and only while packets come.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_S: Final = 50e-6
"""Two looks that are closer had nothing in between; one takes a few microseconds."""
_TELL_S: Final = 1.0


class BusyPoll:
    """Of one event loop, and only for its thread.

    Attributes:
        polls: The loop does not sleep now.
    """

    def __init__(self, poll_s: float, spent: Callable[[float], None]) -> None:
        """Wait for a packet.

        Args:
            poll_s: How long to go on after each packet, in seconds.
            spent: Hears of the seconds in which nothing came, once a second and in the end.
        """
        self.polls = False
        self._poll_s = poll_s
        self._spent = spent
        self._spent_s = 0.0
        self._touched_s = self._looked_s = 0.0

    def touch(self) -> None:
        """A packet has come."""
        self._touched_s = time.monotonic()
        if not self.polls:
            self.polls, self._looked_s = True, self._touched_s
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look for packets, and come back here without sleep."""
        now_s = time.monotonic()
        since_s, self._looked_s = now_s - self._looked_s, now_s
        if since_s < _LOOK_S:
            self._spent_s += since_s
        self.polls = now_s - self._touched_s < self._poll_s
        if self.polls:
            asyncio.get_running_loop().call_soon(self._look)
        if self._spent_s >= _TELL_S or not self.polls:
            self._spent(self._spent_s)
            self._spent_s = 0.0
