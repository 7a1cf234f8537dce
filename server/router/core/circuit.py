"""A circuit breaker: an engine whose legs keep failing is left alone for a while, then tried with one leg."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_DOUBLINGS: Final = 5
"""How often in a row the time of an open circuit doubles at most."""


class CircuitState(StrEnum):
    """Whether legs may go to an engine, by how the last ones ended."""

    CLOSED = "closed"
    """They may."""
    OPEN = "open"
    """Too many failed in a row: none goes there while another engine can take it."""
    HALF_OPEN = "half_open"
    """The time of the open circuit is up: one leg may try."""


@dataclass(frozen=True, slots=True)
class CircuitRule:
    """When a circuit opens, and for how long.

    Attributes:
        failures: Legs that fail in a row until it does.
        open_s: For how long, in seconds; twice as long every time that the leg which tries fails.
    """

    failures: int
    open_s: float


@dataclass(slots=True)
class Circuit:
    """Of one engine in one role. Times are seconds on one monotonic clock of the caller.

    Attributes:
        state: As it was at the last event.
        until_s: When an open one turns half-open.
    """

    state: CircuitState = CircuitState.CLOSED
    until_s: float = 0.0
    _failures: int = 0
    _opened: int = 0

    def succeeded(self) -> bool:
        """Note a leg that ended well; whether that closed the circuit.

        While it is open that means nothing: legs that began long ago may end well on an engine that takes no new one.
        """
        if self.state is CircuitState.OPEN:
            return False
        closed = self.state is CircuitState.HALF_OPEN
        self.reset()
        return closed

    def failed(self, rule: CircuitRule, now_s: float) -> bool:
        """Note a leg that failed; whether that opened the circuit."""
        if self.state is CircuitState.OPEN:
            return False
        self._failures += 1
        if self.state is CircuitState.CLOSED and self._failures < rule.failures:
            return False
        self.state = CircuitState.OPEN
        self.until_s = now_s + rule.open_s * 2 ** min(self._opened, _DOUBLINGS)
        self._opened += 1
        return True

    def advance(self, now_s: float) -> bool:
        """Let one leg try if it is time for that; whether it is."""
        if self.state is not CircuitState.OPEN or now_s < self.until_s:
            return False
        self.state = CircuitState.HALF_OPEN
        return True

    def reset(self) -> None:
        """Forget every failure: the engine is another one now, or has shown that it works."""
        self.state, self.until_s, self._failures, self._opened = CircuitState.CLOSED, 0.0, 0, 0
