"""Runs inside stock engines: vLLM's NixlConnector, unchanged but for the NIXL agent and the cores it may use.

vLLM's agent has a progress thread that takes a whole core on CPU machines, and its worker pins every engine to the same
core. Both would hide what is to be compared, so stock gets what our connector does about them, and nothing else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from bidikv_server.connector.nixl_agent import AgentProxy, quiet_agent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Stock scheduler and worker under the stock name; only the agent is exchanged, before anything is registered."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, cores)
        self._agent: AgentProxy | None = None
        if self.connector_worker is not None:
            self._agent = AgentProxy(quiet_agent(), poll=True)
            self.connector_worker.nixl_wrapper = self._agent

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Poll fast for a while when a transfer is about to happen, as our connector does."""
        metadata = self._connector_metadata
        if self._agent is not None and (metadata.reqs_to_recv or metadata.reqs_in_batch):
            self._agent.wake()
        super().start_load_kv(forward_context, **kwargs)

    def shutdown(self) -> None:
        """Stop polling, then let NIXL clean up."""
        if self._agent is not None:
            self._agent.close()
        super().shutdown()
