"""The router at a glance, put together from the parts that know: for the admin API."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bidikv._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bidikv_server.router.core.engine_notes import EngineNotes
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.core.recent import RecentTurns
    from bidikv_server.router.metrics import RouterMetrics
    from bidikv_server.router.queue import TurnQueue


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """Where to look.

    Attributes:
        queue: Turns that run and wait.
        metrics: Counts since the start.
        recent: The last turns.
        notes: What decode engines told of themselves last.
        conversations: Tells how many are remembered.
        started_s: When the router was made, on the monotonic clock.
    """

    queue: TurnQueue
    metrics: RouterMetrics
    recent: RecentTurns
    notes: Mapping[EngineUrl, EngineNotes]
    conversations: Callable[[], int]
    started_s: float = field(default_factory=time.monotonic)

    def overview(self) -> dict[str, Any]:
        """Plain values; counts are since the start."""
        return {
            "version": __version__,
            "phase": self.queue.phase,
            "uptime_s": round(time.monotonic() - self.started_s, 3),
            "conversations": self.conversations(),
            "turns_in_flight": self.queue.running,
            "turns_queued": self.queue.waiting,
            **self.metrics.totals(),
        }
