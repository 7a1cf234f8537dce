"""Runs inside our engines: BidiNixlConnector, unchanged, with the times of its hooks in the engine's log.

Everything timed here but the round trips runs on the engine core's own thread: no step starts while it lasts.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bidikv_server.connector import messages, side_channel
from bidikv_server.connector.connector import BidiNixlConnector
from bidikv_server.connector.core import digests
from bidikv_server.connector.decode import DecodeRetention
from comparison.marks import MARK

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.bidikv.benchmark")

_submit = side_channel.Client.submit
_chain = digests.chain


def _tell(what: str, seconds: float, **facts: Any) -> None:
    logger.info("%s%s", MARK, json.dumps({"what": what, "ms": seconds * 1000, **facts}))


def _timed_submit(
    client: side_channel.Client, address: str, message: bytes, *, timeout_s: float
) -> Future[bytes]:
    """Log the round trip of every question, from `submit` to its answer, by kind."""
    started_s = time.perf_counter()
    future = _submit(client, address, message, timeout_s=timeout_s)

    def answered(_: Future[bytes]) -> None:
        seconds = time.perf_counter() - started_s
        _tell(f"round trip {type(messages.decode(message)).__name__}", seconds, bytes=len(message))

    future.add_done_callback(answered)
    return future


def _timed_chain(*arguments: Any, **options: Any) -> Any:
    """Log what hashing one prompt takes."""
    started_s = time.perf_counter()
    chain = _chain(*arguments, **options)
    _tell("digests", time.perf_counter() - started_s, blocks=len(chain.digests))
    return chain


class _Spent:
    """Time that decode's retention took of the engine core's thread since the engine started."""

    seconds = 0.0
    calls = 0


def _metered(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(*arguments: Any, **options: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return hook(*arguments, **options)
        finally:
            _Spent.seconds += time.perf_counter() - started_s
            _Spent.calls += 1

    return timed


# Everything that vLLM's thread runs of it; none of these calls another.
for _name in ("retain", "settle", "handed_out", "expect", "report", "_on_reuse"):
    setattr(DecodeRetention, _name, _metered(getattr(DecodeRetention, _name)))

side_channel.Client.submit = _timed_submit  # type: ignore[method-assign, assignment]
digests.chain = _timed_chain


@dataclass(slots=True)
class _Asked:
    """One request's lookup: since when, and what the scheduler's questions for its answer took so far."""

    since_s: float
    spent_s: float = 0.0
    times: int = 0


class TimedBidiNixlConnector(BidiNixlConnector):
    """Logs the scheduler hooks in which a lookup is sent, asked after and recorded."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: dict[str, _Asked] = {}

    def on_new_request(self, request: Request) -> None:
        """Prefill hashes the prompt and sends its question here."""
        started_s = time.perf_counter()
        super().on_new_request(request)
        seconds = time.perf_counter() - started_s
        _tell("on_new_request", seconds)
        self._asked[request.request_id] = _Asked(started_s)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The scheduler asks in every step until the answer is there."""
        started_s = time.perf_counter()
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        ended_s = time.perf_counter()
        asked = self._asked.get(request.request_id)
        if asked is not None:
            asked.spent_s += ended_s - started_s
            asked.times += 1
            if found[0] is not None:
                del self._asked[request.request_id]
                _tell("asking", asked.spent_s, times=asked.times, tokens=found[0])
                _tell("arrival to answer", ended_s - asked.since_s)
        return found

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decode hashes and records the turn here."""
        started_s = time.perf_counter()
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        _tell("request_finished", time.perf_counter() - started_s)
        _tell("retention so far", _Spent.seconds, calls=_Spent.calls)
        return finished
