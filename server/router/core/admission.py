"""How many turns may run at once, and how many may wait for one of them to end, first come first served."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import NewType

Ticket = NewType("Ticket", int)
"""One turn's place; valid until it leaves."""


class QueueFull(Exception):  # noqa: N818
    """As many turns run and wait as may."""


class Admission:
    """Counts turns in and out.

    Attributes:
        running: Turns that may run now.
    """

    def __init__(self, *, max_in_flight: int | None, max_queue: int) -> None:
        """Let in at most so many turns at once; None lets in every one, and none ever waits."""
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._numbers = itertools.count()
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        self.running: set[Ticket] = set()

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """The next turn would be refused."""
        return not self._has_room() and len(self._waiting) >= self._max_queue

    def enter(self) -> Ticket:
        """Let a turn in: it runs if its ticket is in `running`, else it waits.

        Raises:
            QueueFull: It may do neither.
        """
        if self.full:
            raise QueueFull
        ticket = Ticket(next(self._numbers))
        if self._has_room():
            self.running.add(ticket)
        else:
            self._waiting[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> Ticket | None:
        """Let a turn go, whether it ran or waited. Returns the turn that runs in its place, if one waited for it."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            return None
        self.running.remove(ticket)
        if not self._waiting:
            return None
        promoted, _ = self._waiting.popitem(last=False)
        self.running.add(promoted)
        return promoted

    def _has_room(self) -> bool:
        return self._max_in_flight is None or len(self.running) < self._max_in_flight
