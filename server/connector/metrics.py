"""Prometheus metrics of the connector, registered in vLLM's API server process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics

from bidikv_server import wire
from bidikv_server.connector.config import ConnectorConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BidiPromMetrics(NixlPromMetrics):
    """NIXL's transfer metrics plus `bidikv:index_info`, from which the router learns whom prefill should ask."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Publish the address of each data-parallel rank's index; none for prefill or with readback off."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        if config.role != "decode" or not config.readback:
            return
        info = metric_types[Gauge](
            name=wire.INDEX_INFO_METRIC,
            documentation="Address of the retention index of this decode engine.",
            labelnames=[*labelnames, "engine_id", "address"],
        )
        for rank, values in per_engine_labelvalues.items():
            info.labels(*values, transfer.engine_id, config.index_address(rank)).set(1)
