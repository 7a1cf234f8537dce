"""Worker side of the connector: believe a read only after decode has confirmed its blocks.

Runs on the engine's worker thread, once per step; nothing here blocks.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from bidikv_server.connector import messages
from bidikv_server.connector.config import ConnectorConfigError
from bidikv_server.connector.metadata import ReadbackCheck, ReadbackOutcomes
from bidikv_server.connector.nixl_agent import AgentProxy, quiet_agent
from bidikv_server.connector.side_channel import Client
from bidikv_server.connector.stats import BidiStats
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from bidikv_server.connector.config import ConnectorConfig
    from bidikv_server.connector.metadata import BidiConnectorMetadata

logger = logging.getLogger("vllm.bidikv")


_LEAST_VALIDATION_S: Final = 1.0
"""A read that ended just before its deadline still gets this long to be confirmed."""


@dataclass(slots=True)
class _Reading:
    """One readback on this rank: reading until `verdict` is asked for, then waiting for it; `deadline_s` bounds both."""

    check: ReadbackCheck
    deadline_s: float
    verdict: Future[bytes] | None = None


@contextmanager
def _unchanged_affinity() -> Iterator[None]:
    """Undo what NIXL's worker does on CPU: it pins the engine to its last core, which is every engine's last core.

    On a small machine all engines then share one core while the others idle, whatever their OpenMP threads.
    """
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class BidiConnectorWorker(NixlPullConnectorWorker):
    """NIXL's pull worker; readbacks end only when validated."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: ConnectorConfig
    ) -> None:
        """Wrap the NIXL agent; on CPU engines replace the one whose progress thread would take a core.

        Raises:
            ConnectorConfigError: That agent cannot be replaced.
        """
        quiet = config.quiet_progress if config.quiet_progress is not None else current_platform.is_cpu()
        if quiet and vllm_config.model_config.enable_sleep_mode:
            raise ConnectorConfigError(
                "kv_connector_extra_config.bidikv.quiet_progress: vLLM's sleep mode needs NIXL's own progress thread; "
                "set it to false, or do not enable sleep mode"
            )
        with _unchanged_affinity():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        # No memory is registered and no peer known yet, so the agent can still be exchanged.
        agent: Any = quiet_agent() if quiet else self.nixl_wrapper
        self.nixl_wrapper: Any = AgentProxy(agent, poll=quiet)
        # vLLM adds the scheduler side's statistics to the worker's, so both must have room for the same events.
        self.xfer_stats = BidiStats()
        self._client = Client(secret=config.secret.get_secret_value())
        self._readings: dict[str, _Reading] = {}
        # Handles of overdue reads, by request.
        self._stuck: dict[str, list[int]] = {}
        self._outcomes = ReadbackOutcomes()

    def add_remote_agent(self, nixl_agent_meta: NixlAgentMetadata, *args: Any, **kwargs: Any) -> str:
        """Refuse what vLLM lets pass: on CPU it takes blocks of another size apart along the wrong dimension.

        Raises:
            RuntimeError: The peer's blocks are of another size. The handshake fails, and with it every transfer.
        """
        if current_platform.is_cpu() and nixl_agent_meta.block_size != self.block_size:
            raise RuntimeError(
                f"bidikv: start all engines with one --block-size; here it is {self.block_size}, "
                f"there {nixl_agent_meta.block_size}, and CPU engines cannot exchange such blocks"
            )
        name: str = super().add_remote_agent(nixl_agent_meta, *args, **kwargs)
        return name

    def start_load_kv(self, metadata: BidiConnectorMetadata) -> None:
        """Note what has to be validated, then start the reads."""
        now_s = time.monotonic()
        for request_id, check in metadata.readbacks.items():
            self._readings[request_id] = _Reading(check, now_s + check.timeout_s)
        if metadata.reqs_to_recv or metadata.reqs_in_batch:
            self.nixl_wrapper.wake()
        super().start_load_kv(metadata)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Hold finished readbacks back until their verdict is in; end those that are overdue."""
        if transfers is not self._recving_transfers:
            stock: tuple[set[str], set[str]] = super()._pop_done_transfers(transfers)
            return stock
        self._poll_stuck()
        now_s = time.monotonic()
        overdue = self._set_aside_overdue(transfers, now_s)
        done, failed = super()._pop_done_transfers(transfers)
        failed |= overdue
        for request_id in (done & self._readings.keys()) - failed - self._recv_failures:
            self._ask(self._readings[request_id], now_s)
            done.discard(request_id)
        for request_id, reading in self._readings.items():
            if reading.verdict is not None and (reading.verdict.done() or now_s >= reading.deadline_s):
                if self._confirmed(reading.verdict):
                    done.add(request_id)
                else:
                    # Reported as failed by get_transfer_results: no handle of it is outstanding any more.
                    failed.add(request_id)
                    self._outcomes.outcomes[request_id] = Reason.VALIDATION_FAILED
        return done, failed

    def _set_aside_overdue(self, transfers: dict[str, list[int]], now_s: float) -> set[str]:
        """Fail reads that outlived their bound, and keep their handles: until they end, the transport may still write.

        The scheduler side holds their blocks back meanwhile (`quarantine.py`). A read still in its handshake has nothing
        under way; vLLM's own time-out ends it.
        """
        overdue = {
            request_id
            for request_id, reading in self._readings.items()
            if now_s >= reading.deadline_s and transfers.get(request_id)
        }
        for request_id in overdue:
            self._stuck[request_id] = transfers.pop(request_id)
            self._outcomes.stuck[request_id] += 1
        return overdue

    def _poll_stuck(self) -> None:
        """Let handles of overdue reads go once they have ended, well or not."""
        for request_id, handles in list(self._stuck.items()):
            running = [handle for handle in handles if not self._has_ended(request_id, handle)]
            if running:
                self._stuck[request_id] = running
            else:
                del self._stuck[request_id]
                self._outcomes.unstuck[request_id] += 1

    def _has_ended(self, request_id: str, handle: int) -> bool:
        if not self.nixl_wrapper.has_ended(handle):
            return False
        released: bool = self._try_release_xfer_handle(request_id, handle)
        return released

    def _ask(self, reading: _Reading, now_s: float) -> None:
        check = reading.check
        message = messages.Validate(
            messages.VERSION, check.epoch, list(check.block_ids), list(check.generations)
        )
        timeout_s = max(_LEAST_VALIDATION_S, reading.deadline_s - now_s)
        reading.deadline_s = now_s + timeout_s
        reading.verdict = self._client.submit(
            check.index_address, messages.encode(message), timeout_s=timeout_s
        )

    @staticmethod
    def _confirmed(verdict: Future[bytes]) -> bool:
        if not verdict.done() or verdict.exception() is not None:
            return False
        reply = messages.decode(verdict.result())
        return isinstance(reply, messages.Verdict) and reply.v == messages.VERSION and reply.valid

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Stock results, with an account of the readbacks among them."""
        results = super().get_transfer_results()
        for request_id in results.finished_recving & self._readings.keys():
            del self._readings[request_id]
            failed = request_id in results.failed_recving
            self._outcomes.outcomes.setdefault(request_id, Reason.TRANSFER_FAILED if failed else Reason.HIT)
        return results

    def take_outcomes(self) -> ReadbackOutcomes | None:
        """What became of readbacks since the last call; None if nothing did."""
        taken, self._outcomes = self._outcomes, ReadbackOutcomes()
        return taken if taken != ReadbackOutcomes() else None

    def shutdown(self) -> None:
        """Stop our threads, then let NIXL clean up."""
        self._client.close()
        self.nixl_wrapper.close()
        super().shutdown()
