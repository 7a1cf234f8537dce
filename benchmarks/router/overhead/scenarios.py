"""What is measured: five loads, each made to show one figure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Scenario:
    """One load.

    Attributes:
        what: In words.
        clients: That play turns at the same time, each one turn after the other.
        events: Of every streamed answer.
        pace_s: Between two events of one stream.
        spread_s: Time over which the clients begin, so that they do not go in step.
        body_bytes: Of a request; 0 leaves it at the few KB of a young conversation.
        awake: No core of the machine is let go idle meanwhile (`awake`).
    """

    what: str
    clients: int
    events: int = 1
    pace_s: float = 0.0
    spread_s: float = 0.0
    body_bytes: int = 0
    awake: bool = False


_STREAMS: Final = Scenario(
    "100 streams at 50 events a second each", 100, events=50, pace_s=0.02, spread_s=1.0
)
SCENARIOS: Final = {
    "streams": _STREAMS,
    "awake": replace(_STREAMS, what="the same on cores that are never idle", awake=True),
    "turns": Scenario("turns that are not streamed, as many as go", 32),
    "events": Scenario(
        "600 streams at 50 events a second each, 500 events long", 600, events=500, pace_s=0.02, spread_s=2.0
    ),
    "large": Scenario("one client with a body of 1 MB", 1, body_bytes=1_000_000),
}
