"""Scheduler side of the connector: decode retains and answers, prefill looks up and plans its pulls.

Runs on the engine core's main thread. Only `IndexService.answer` and `sweep` run on the index thread, and touch nothing but
the retention index, under its lock: vLLM's block pool belongs to the engine core's thread alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.platforms import current_platform

from bidikv_server.connector.config import ConnectorConfig, ConnectorConfigError
from bidikv_server.connector.decode import DecodeRetention
from bidikv_server.connector.index_service import refuse_all
from bidikv_server.connector.metadata import BidiConnectorMetadata, ReadbackCheck, ReadbackOutcomes
from bidikv_server.connector.prefill import PrefillReadback
from bidikv_server.connector.requests import (
    attention_objection,
    ended_well,
    engine_identity,
    fence_objection,
    is_handle,
    layout_objection,
    may_have_met_a_stop_string,
    parallel_objection,
)
from bidikv_server.connector.side_channel import Server
from bidikv_server.connector.stats import BidiStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.bidikv")


class BidiConnectorScheduler(NixlPullConnectorScheduler):
    """NIXL's pull scheduler, with stock readback replaced by ours on either side."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: ConnectorConfig
    ) -> None:
        """Start the retention index (decode) or the lookup client (prefill)."""
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if self.is_bidirectional_kv_xfer_enabled:
            raise ConnectorConfigError(
                "kv_connector_extra_config.bidirectional_kv_xfer: remove it; BidiNixlConnector replaces it"
            )
        self.stats = BidiStats()
        self._decode: DecodeRetention | None = None
        self._prefill: PrefillReadback | None = None
        self._refusing: Server | None = None
        self._config = config
        if not config.readback:
            return
        if config.role == "prefill" and vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConnectorConfigError(
                'kv_load_failure_policy: set it to "recompute" on prefill; "fail" makes an error of every lost reuse'
            )
        objection = (
            layout_objection(kv_cache_config)
            or parallel_objection(vllm_config)
            or attention_objection(vllm_config, on_cpu=current_platform.is_cpu())
        )
        if self.use_host_buffer:
            objection = objection or "kv_buffer_device=cpu stages blocks in host memory"
        if config.role == "prefill":
            objection = objection or fence_objection(vllm_config)
        if objection is not None:
            logger.warning("bidikv: no KV is reused from decode for this model: %s", objection)
        self._identity = engine_identity(vllm_config, self.block_size)
        if config.role == "prefill":
            self._prefill = PrefillReadback(
                config, self._identity, self.block_size, self.stats, supported=objection is None
            )
        self._objection = objection

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """Take vLLM's block pool and start to serve; called once, before the first request.

        Raises:
            OSError: The index port is taken.
        """
        if self._prefill is not None:
            self._prefill.bind(block_pool)
        if self._config.role == "prefill" or not self._config.readback:
            return
        parallel = self.vllm_config.parallel_config
        if self._objection is not None:
            self._refusing = Server(
                self._config.listen_address(parallel.data_parallel_index),
                refuse_all(f"decode retains nothing: {self._objection}"),
                secret=self._config.secret.get_secret_value(),
            )
            return
        self._decode = DecodeRetention(
            self._config,
            block_pool,
            self.stats,
            identity=self._identity,
            block_size=self.block_size,
            rank=parallel.data_parallel_index,
            connection={
                "engine_id": self.engine_id,
                "host": self.side_channel_host,
                "port": self.side_channel_port,
                "tp_size": self.transfer_tp_size,
                "dcp_size": parallel.decode_context_parallel_size,
                "pp_size": parallel.pipeline_parallel_size,
            },
            # From vLLM 0.33 on: a decode engine that slept registers its memory anew.
            registration=lambda: getattr(self, "_registration_generation", 0),
        )

    def on_new_request(self, request: Request) -> None:
        """Start a prefill request's lookup early, so that the answer is there when the scheduler asks."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and not is_handle(params):
            logger.warning("bidikv: request %s names no KV to fetch, computing it", request.request_id)
            params["do_remote_prefill"] = False
        super().on_new_request(request)
        self.settle()
        if self._prefill is not None and params.get("do_remote_decode"):
            self._prefill.start(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to pull beyond the local hit; (None, False) while a lookup is under way.

        For prefill this never reaches the stock code, which would pull by position whatever a client's
        `remote_block_ids` name.
        """
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            if self._decode is not None:
                self._decode.expect(-(-(request.num_tokens - num_computed_tokens) // self.block_size) + 1)
            stock: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return stock
        if self._prefill is None:
            return 0, False
        return self._prefill.matched_tokens(request.request_id, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Commit the planned pull to the blocks that were allocated for it."""
        params = request.kv_transfer_params or {}
        if self._decode is not None:
            self._decode.handed_out(len(blocks.get_block_ids()[0]))
        if not params.get("do_remote_decode"):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        self._reqs_in_batch.add(request.request_id)
        if self.use_host_buffer:
            self._reqs_need_save[request.request_id] = request
        if self._prefill is not None:
            self._prefill.runs(request.request_id)
            if num_external_tokens > 0:
                self._prefill.commit(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BidiConnectorMetadata:
        """Hand this step's reads, and what it takes to believe them, to the workers."""
        if self._decode is not None:
            grown = scheduler_output.scheduled_cached_reqs.new_block_ids
            self._decode.handed_out(sum(len(blocks[0]) for blocks in grown if blocks))
        stock = super().build_connector_meta(scheduler_output)
        checks: dict[str, ReadbackCheck] = {}
        if self._prefill is not None:
            for read in self._prefill.take_reads():
                stock.add_new_req_to_recv(
                    request_id=read.request_id,
                    local_block_ids=(list(read.local_block_ids),),
                    kv_transfer_params=read.kv_transfer_params,
                    local_num_computed_blocks=(read.first_block,),
                    awaiting_kvs=True,
                )
                checks[read.request_id] = read.check
        return BidiConnectorMetadata.extend(stock, checks)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn how reads ended."""
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        if self._prefill is None:
            return
        if isinstance(meta, ReadbackOutcomes):
            self._prefill.ended(meta)
        self._prefill.over(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Retain a decode request's blocks; account for a prefill request's reuse."""
        is_prefill_leg = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        delay_free, answer = super().request_finished(request, block_ids)
        if is_prefill_leg:
            if self._prefill is not None:
                account = self._prefill.account(request)
                answer = {**answer, **account} if answer is not None else None
        elif self._decode is not None and (
            (complete := ended_well(request)) or may_have_met_a_stop_string(request)
        ):
            self._decode.retain(request, block_ids, complete=complete)
        return delay_free, answer

    def settle(self) -> None:
        """After vLLM has freed what finished in a step: let go of the blocks that were retained in it."""
        if self._decode is not None:
            self._decode.settle()

    def take_stats(self) -> BidiStats | None:
        """What happened on this side since the last call; None if nothing did."""
        if self._decode is not None and not self.stats.is_empty():
            self._decode.report()
        if self.stats.is_empty():
            return None
        taken: BidiStats = self.stats.clone_and_reset()
        return taken

    def shutdown(self) -> None:
        """Release the index port and stop our threads."""
        super().shutdown()
        if self._decode is not None:
            self._decode.close()
        if self._prefill is not None:
            self._prefill.close()
        if self._refusing is not None:
            self._refusing.close()
