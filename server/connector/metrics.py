"""Prometheus metrics of the connector, registered in vLLM's API server process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics

from bidikv_server import wire
from bidikv_server.connector.config import ConnectorConfig
from bidikv_server.connector.stats import EVENTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: Final = {
    "readbacks": ("reason", "Prefill legs by what became of their reuse."),
    "prompt_tokens": (
        "source",
        "Prompt tokens by where their KV came from: remote (decode), local or computed.",
    ),
    "readback_blocks": ("result", "Blocks pulled from decode: verified, or rejected and recomputed."),
    "retained_turns": ("kind", "Finished turns by what decode did: retained, or why not."),
    "retained_blocks": ("class", "Blocks recorded for reading, by class of retention."),
    "lost_blocks": (
        "cause",
        "Retained blocks that can no longer be read: evicted, expired or released.",
    ),
    "index_requests": (
        "kind",
        "Messages to the retention index: lookup, validate, refused or malformed.",
    ),
}
"""Counters by name, without prefix and suffix: their label and what they count."""

HISTOGRAMS: Final = {
    "lookup_seconds": "From a prefill request's arrival to decode's answer.",
    "readback_seconds": "From the allocation of blocks for a readback to its verdict.",
}
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

GAUGES: Final = {
    "retained_tokens": (
        "class",
        "Tokens whose blocks decode held readable at its last step, by class of retention.",
    ),
    "pull_threshold_tokens": (
        "source",
        "Tokens from which on a pull from this index beats computing them, as learnt with learn_threshold.",
    ),
}


class BidiPromMetrics(NixlPromMetrics):
    """NIXL's transfer metrics, ours, and `bidikv:index_info`, from which the router learns whom prefill should ask."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register everything; the address of an index only for decode engines with readback on."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._label_values = per_engine_labelvalues
        counter, gauge, histogram = (metric_types[kind] for kind in (Counter, Gauge, Histogram))
        self._metrics = {
            name: counter(name=f"bidikv:{name}", documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(name=f"bidikv:{name}", documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in GAUGES.items()
        }
        self._histograms = {
            name: histogram(
                name=f"bidikv:{name}", documentation=text, labelnames=labelnames, buckets=_SECONDS
            )
            for name, text in HISTOGRAMS.items()
        }
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        if config.role == "decode" and config.readback:
            info = gauge(
                name=wire.INDEX_INFO_METRIC,
                documentation="Address of the retention index of this decode engine.",
                labelnames=[*labelnames, "engine_id", "address"],
            )
            for rank, values in per_engine_labelvalues.items():
                info.labels(*values, transfer.engine_id, config.index_address(rank)).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's statistics of one engine."""
        super().observe(transfer_stats_data, engine_idx)
        values = self._label_values[engine_idx]
        for metric, label, value in transfer_stats_data.get(EVENTS, ()):
            if metric in self._metrics:
                self._metrics[metric].labels(*values, label).inc(value)
            elif metric in self._gauges:
                self._gauges[metric].labels(*values, label).set(value)
            elif metric in self._histograms:
                self._histograms[metric].labels(*values).observe(value)
