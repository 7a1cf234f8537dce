"""The last turns of the whole router, in the order in which they ended: what an operator sees come in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bidikv_server.router.core.reports import TurnReport


@dataclass(frozen=True, slots=True)
class Ended:
    """One turn that has ended.

    Attributes:
        number: Counts turns from 1.
        at_s: When it ended, on the caller's monotonic clock.
        report: What was seen of it.
    """

    number: int
    at_s: float
    report: TurnReport


class RecentTurns:
    """Bounded memory of turns, oldest first out."""

    def __init__(self, *, max_turns: int) -> None:
        self._turns: deque[Ended] = deque(maxlen=max_turns)
        self._number = 0

    def add(self, report: TurnReport, at_s: float) -> None:
        """Remember a turn that ended at `at_s`."""
        self._number += 1
        self._turns.append(Ended(self._number, at_s, report))

    def latest(self, limit: int, *, after: int = 0) -> tuple[Ended, ...]:
        """At most `limit` turns whose number is above `after`, newest first."""
        found: list[Ended] = []
        for turn in reversed(self._turns):
            if turn.number <= after or len(found) == limit:
                break
            found.append(turn)
        return tuple(found)
