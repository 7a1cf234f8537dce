"""Decode's scheduler side: retain finished turns softly or protected, and never at a running request's cost."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from bidikv_server.connector import requests
from bidikv_server.connector.core import digests, readback
from bidikv_server.connector.core.protection import Change, Holding, ProtectedSet
from bidikv_server.connector.index_service import IndexService
from bidikv_server.connector.side_channel import Server

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from bidikv_server.connector.config import ConnectorConfig
    from bidikv_server.connector.requests import Recorder

logger = logging.getLogger("vllm.bidikv")


class DecodeRetention:
    """Owns the references that retention holds. Engine core thread only; the index answers on a thread of its own."""

    def __init__(
        self,
        config: ConnectorConfig,
        block_pool: BlockPool,
        stats: Recorder,
        *,
        identity: str,
        block_size: int,
        rank: int,
        connection: dict[str, Any],
    ) -> None:
        """Start listening.

        Raises:
            OSError: The index port is taken.
        """
        self._config = config
        self._pool = block_pool
        self._stats = stats
        self._identity = identity
        self._block_size = block_size
        self._protected = ProtectedSet(int(block_pool.num_gpu_blocks * config.protected_share))
        self._to_unpin: list[int] = []
        self._index = IndexService(identity, connection, block_pool.num_gpu_blocks)
        host, port = config.index_host, config.index_port + rank
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._server = Server(address, self._index.answer, secret=config.secret.get_secret_value())
        logger.info(
            "bidikv: retention index on %s, TTL %g s, at most %d of %d blocks protected",
            address,
            config.decoder_kv_blocks_ttl,
            int(block_pool.num_gpu_blocks * config.protected_share),
            block_pool.num_gpu_blocks,
        )

    def retain(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Record a finished turn, if it is one of a known conversation and can be proven.

        The blocks are referenced until `settle`, after vLLM has freed the request; protected ones for longer.
        """
        leg = requests.LegParams.of(request)
        if leg is None:
            return
        if leg.release:
            self._index.release(leg.conversation)
            self._apply(self._protected.release(leg.conversation))
            self._stats.record("retained_turns", 1, "final")
        if leg.retain_s <= 0:
            return
        if not requests.provable(request):
            self._stats.record("retained_turns", 1, "unsupported")
            return
        tokens = request.all_token_ids
        count = readback.retainable_blocks(
            all_tokens=len(tokens),
            computed_tokens=request.num_computed_tokens,
            in_flight_tokens=request.num_in_flight_tokens,
            block_size=self._block_size,
            block_ids=block_ids[0],
        )
        held = tuple(block_ids[0][:count])
        if any(self._pool.blocks[block_id].is_null for block_id in held):
            self._stats.record("retained_turns", 1, "unsupported")
            return
        start = requests.seed(request, leg, self._identity)
        chain = digests.chain(start, tokens, block_size=self._block_size, blocks=count)
        self._hold(leg, held, len(tokens))
        self._index.retain(leg.conversation, chain, held, ttl_s=self._ttl_s(leg))
        self._stats.record("retained_turns", 1, "retained")

    def _hold(self, leg: requests.LegParams, held: tuple[int, ...], tokens: int) -> None:
        """Reference every block of the turn: the protected ones until they are given up, the others until `settle`."""
        now_s = time.monotonic()
        self._pool.touch([self._pool.blocks[block_id] for block_id in held])
        if leg.protect:
            holding = Holding(leg.conversation, held, now_s, now_s + self._ttl_s(leg), tokens)
            change = self._protected.admit(holding, now_s=now_s)
        else:
            change = self._protected.release(leg.conversation)
        self._to_unpin += [block_id for block_id in held if block_id not in change.pin]
        self._to_unpin += change.unpin
        self._stats.record("retained_blocks", len(change.pin), "protected")
        self._stats.record("retained_blocks", len(held) - len(change.pin), "soft")

    def _ttl_s(self, leg: requests.LegParams) -> float:
        return min(leg.retain_s, self._config.decoder_kv_blocks_ttl)

    def settle(self) -> None:
        """Turn references into soft retention: the blocks count as free and are handed out last.

        This runs at the next hook after the request was freed. Unpinning in `retain` would leave the request as the
        last holder, and its free puts blocks that carry no prefix-cache hash at the front of the free queue.
        """
        self._to_unpin += self._protected.expire(time.monotonic()).unpin
        if self._to_unpin:
            # The first blocks of a prefix are worth most, so they join the queue last.
            unpin, self._to_unpin = reversed(self._to_unpin), []
            self._unpin(unpin)

    def make_room(self, blocks: int) -> None:
        """Before vLLM allocates: give protected blocks up until `blocks` blocks are free."""
        missing = blocks - self._pool.get_num_free_blocks()
        if missing > 0 and len(self._protected):
            self._apply(self._protected.give_up(missing, now_s=time.monotonic()))

    def give_way(self) -> bool:
        """VLLM could not allocate for a running request and would preempt one: whether giving up helped instead."""
        if not len(self._protected):
            return False
        # A step needs about a block per running request; an eighth of what is held saves asking again at once.
        self._apply(self._protected.give_up(max(1, len(self._protected) // 8), now_s=time.monotonic()))
        return True

    def clear(self) -> None:
        """Forget everything, for a reset of the engine's caches."""
        self._apply(self._protected.release_all())
        self.settle()
        self._index.clear()

    def report(self) -> None:
        """Carry the index thread's counts and the current holdings to the statistics."""
        asked, lost, held = self._index.take_counts()
        for kind, count in asked.items():
            self._stats.record("index_requests", count, kind)
        for cause, count in lost.items():
            self._stats.record("lost_blocks", count, cause)
        protected = len(self._protected)
        self._stats.record("retained_tokens", protected * self._block_size, "protected")
        self._stats.record("retained_tokens", max(0, held - protected) * self._block_size, "soft")

    def _apply(self, change: Change) -> None:
        if change.unpin:
            self._unpin(sorted(change.unpin, reverse=True))

    def _unpin(self, block_ids: Iterable[int]) -> None:
        self._pool.unpin_blocks([self._pool.blocks[block_id] for block_id in block_ids], self._on_reuse)

    def _on_reuse(self, block: KVCacheBlock) -> None:
        self._index.reused(block.block_id)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.close()
