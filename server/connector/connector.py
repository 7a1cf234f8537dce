"""The class vLLM instantiates; it only forwards to the scheduler side or the worker side."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

from bidikv_server import wire
from bidikv_server.connector.config import ConnectorConfig, ConnectorConfigError
from bidikv_server.connector.metrics import BidiPromMetrics
from bidikv_server.connector.scheduler import BidiConnectorScheduler
from bidikv_server.connector.stats import BidiStats
from bidikv_server.connector.worker import BidiConnectorWorker
from bidikv_server.versions import vllm_objection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig


class BidiNixlConnector(NixlPullConnector):
    """NIXL pull connector with verified readback; see `docs/structure.md` for a turn's way through it."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Build the side that `role` names.

        Raises:
            ConnectorConfigError: `kv_connector_extra_config` cannot be used, or not with this version of vLLM.
        """
        # The pull connector's own constructor would build stock sides first.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        config = ConnectorConfig.parse(
            self.kv_transfer_config.kv_connector_extra_config, secret=os.environ.get(wire.SECRET_VARIABLE, "")
        )
        objection = vllm_objection(vllm_version)
        if objection is not None and not config.allow_untested_vllm:
            raise ConnectorConfigError(objection)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = BidiConnectorScheduler(
                vllm_config, self.engine_id, kv_cache_config, config
            )
        else:
            self.connector_worker = BidiConnectorWorker(vllm_config, self.engine_id, kv_cache_config, config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Scheduler side: take the block pool that retention works on."""
        if isinstance(self.connector_scheduler, BidiConnectorScheduler):
            self.connector_scheduler.bind_block_pool(gpu_block_pool)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Scheduler side: vLLM asks at the end of every step, after it freed what finished."""
        if isinstance(self.connector_scheduler, BidiConnectorScheduler):
            self.connector_scheduler.settle()
        events: Iterable[KVCacheEvent] = super().take_events()
        return events

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Either side: statistics since the last call."""
        if isinstance(self.connector_scheduler, BidiConnectorScheduler):
            return self.connector_scheduler.take_stats()
        stats: KVConnectorStats | None = super().get_kv_connector_stats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """API server: wrap statistics that vLLM moved here."""
        return BidiStats(data=data) if data is not None else BidiStats()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Worker side: tell the scheduler side how readbacks ended."""
        if isinstance(self.connector_worker, BidiConnectorWorker):
            return self.connector_worker.take_outcomes()
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """API server: NIXL's metrics plus where the retention index listens."""
        return BidiPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
