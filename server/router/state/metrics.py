"""Metrics of the shared state; a router that shares nothing has none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class StateMetrics:
    """What becomes of a router's calls to the server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge("bidikv_router_state_up", "Whether the shared state is in use.", registry=registry)
        self.seconds = Histogram(
            "bidikv_router_state_seconds",
            "Duration of calls to the shared state, by call and outcome.",
            ["call", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.skipped = Counter(
            "bidikv_router_state_skipped",
            "Calls that were not made because the shared state was down.",
            ["call"],
            registry=registry,
        )
        self.bad_values = Counter(
            "bidikv_router_state_bad_values",
            "Values in the shared state that no router wrote; they were left out.",
            registry=registry,
        )
        self.written_back = Counter(
            "bidikv_router_state_written_back",
            "Turns and releases written to the shared state after it was down.",
            registry=registry,
        )
        self.lost = Counter(
            "bidikv_router_state_lost",
            "Turns and releases that were too many to keep until the shared state was up again.",
            registry=registry,
        )
