"""What the connector counts inside the engine, carried to vLLM's API server with NIXL's own statistics.

Runs on the engine core's and worker's threads (`record`, `take`) and, after vLLM has moved the data, in the API server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

EVENTS: Final = "bidikv_events"
"""Key of our list beside NIXL's: `[metric, label, value]` each, in order."""


class BidiStats(NixlKVConnectorStats):
    """NIXL's statistics plus our events. Serialisable as vLLM needs it: lists of numbers and text."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.data[EVENTS] = []

    def record(self, metric: str, value: float = 1, label: str = "") -> None:
        """Note one event; `metric` is a name of `metrics.py`, without the prefix."""
        self.data[EVENTS].append([metric, label, value])

    def is_empty(self) -> bool:
        """Whether there is nothing to move."""
        return super().is_empty() and not self.data.get(EVENTS)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Take over another's events, also those of a worker that only has NIXL's."""
        self.data.setdefault(EVENTS, [])
        merged: KVConnectorStats = super().aggregate(other)
        return merged

    def reduce(self) -> dict[str, int | float]:
        """NIXL's summary for vLLM's log line, with the number of readbacks in it."""
        summary: dict[str, int | float] = super().reduce()
        readbacks = sum(1 for metric, _, _ in self.data.get(EVENTS, []) if metric == "readbacks")
        return {**summary, "Num readbacks asked": readbacks} if readbacks else summary
