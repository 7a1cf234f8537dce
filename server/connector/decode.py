"""Decode's scheduler side: retain finished turns, never at a running request's cost.

Every retained block is a free block that can still be read. What the pool does not know is which of them it should hand
out last: protected ones are therefore moved to the tail of its free queue again before their turn would come.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.connector import requests
from bidikv_server.connector.core import digests, readback
from bidikv_server.connector.core.digests import ChainMemory
from bidikv_server.connector.core.protection import Holding, ProtectedSet
from bidikv_server.connector.index_service import IndexService
from bidikv_server.connector.side_channel import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from bidikv_server.connector.config import ConnectorConfig
    from bidikv_server.connector.requests import Recorder

logger = logging.getLogger("vllm.bidikv")

_CHAINS_PER_POOL: Final = 4
"""Tokens whose digests are remembered, in pools: as many as the index remembers turns of."""


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
        registration: Callable[[], int] = lambda: 0,
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
        budget_blocks = int(block_pool.num_gpu_blocks * config.protected_share)
        self._protected = ProtectedSet(budget_blocks)
        self._chains = ChainMemory(_CHAINS_PER_POOL * block_pool.num_gpu_blocks * block_size)
        self._to_unpin: list[int] = []
        # Free blocks ahead of the protected ones in the queue after the last refresh, and blocks handed out since.
        self._ahead = 0
        self._handed_out = 0
        self._index = IndexService(
            identity,
            connection,
            block_pool.num_gpu_blocks,
            max_ttl_s=config.decoder_kv_blocks_ttl,
            registration=registration,
        )
        address = config.listen_address(rank)
        self._server = Server(
            address, self._index.answer, secret=config.secret.get_secret_value(), idle=self._index.sweep
        )
        logger.info(
            "bidikv: retention index on %s, TTL %g s, at most %d of %d blocks protected",
            address,
            config.decoder_kv_blocks_ttl,
            budget_blocks,
            block_pool.num_gpu_blocks,
        )

    def retain(self, request: Request, block_ids: tuple[list[int], ...], *, complete: bool = True) -> None:
        """Record a finished turn, if it is one of a known conversation and can be proven.

        The blocks are referenced until `settle`, after vLLM has freed the request.

        Args:
            request: It has just ended.
            block_ids: Its blocks, by KV cache group.
            complete: Whether the turn certainly ended well. One that may have been given up is kept like any other, but
                neither replaces what its conversation left before nor releases or protects anything.
        """
        leg = requests.LegParams.of(request)
        if leg is None:
            return
        if leg.release and complete:
            self._index.release(leg.conversation)
            self._forget(leg.conversation)
            self._stats.record("retained_turns", 1, "final")
        if leg.retain_s <= 0:
            return
        held = self._settled_blocks(request, block_ids[0])
        if held is None:
            self._stats.record("retained_turns", 1, "unsupported")
            return
        if not held:
            return
        chain = digests.chain(
            requests.seed(request, leg, self._identity),
            request.all_token_ids,
            block_size=self._block_size,
            blocks=len(held),
            media=digests.media_marks(requests.media_items(request), self._block_size),
            known=self._chains.get(leg.conversation),
        )
        self._hold(held)
        if complete:
            self._chains.put(leg.conversation, chain)
            self._protect(leg, held, request.num_tokens)
        else:
            self._stats.record("retained_blocks", len(held), "soft")
        self._index.retain(
            leg.conversation,
            chain,
            held,
            ttl_s=self._ttl_s(leg),
            complete=complete,
            keep=() if complete else self._protected,
        )
        self._stats.record("retained_turns", 1, "retained" if complete else "stop_string")

    def _settled_blocks(self, request: Request, block_ids: list[int]) -> tuple[int, ...] | None:
        """The blocks of a finished request whose KV is written for good; None when they cannot be proven."""
        if not requests.provable(request):
            return None
        count = readback.retainable_blocks(
            all_tokens=request.num_tokens,
            computed_tokens=request.num_computed_tokens,
            in_flight_tokens=request.num_in_flight_tokens,
            block_size=self._block_size,
            block_ids=block_ids,
        )
        held = tuple(block_ids[:count])
        return None if any(self._pool.blocks[block_id].is_null for block_id in held) else held

    def _hold(self, held: tuple[int, ...]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in held])
        self._to_unpin += held

    def _protect(self, leg: requests.LegParams, held: tuple[int, ...], tokens: int) -> None:
        now_s = time.monotonic()
        before = len(self._protected)
        if leg.protect:
            self._protected.admit(
                Holding(leg.conversation, held, now_s, now_s + self._ttl_s(leg), tokens), now_s=now_s
            )
        else:
            self._protected.release(leg.conversation)
        grown = max(0, len(self._protected) - before)
        self._stats.record("retained_blocks", grown, "protected")
        self._stats.record("retained_blocks", len(held) - grown, "soft")

    def _forget(self, conversation: str) -> None:
        self._protected.release(conversation)
        self._chains.forget(conversation)

    def _follow_peers(self, now_s: float) -> None:
        """Do for protection what the index was asked to do since the last time."""
        for conversation, until_s in self._index.take_changes().items():
            if until_s is None:
                self._forget(conversation)
            else:
                self._protected.renew(conversation, until_s, now_s=now_s)

    def _ttl_s(self, leg: requests.LegParams) -> float:
        return min(leg.retain_s, self._config.decoder_kv_blocks_ttl)

    def settle(self) -> None:
        """Turn references into soft retention: the blocks count as free and join the tail of the free queue.

        Only once ours is the last reference. The request's own free, or one that vLLM defers until a running step has
        ended, would put blocks that carry no prefix-cache hash at the front of the queue, and they would be handed out
        first.
        """
        if not self._to_unpin:
            return
        # The first blocks of a prefix are worth most, so they join the queue last.
        blocks = [self._pool.blocks[block_id] for block_id in reversed(self._to_unpin)]
        # A block that two finished turns share has two references of ours.
        ours = Counter(self._to_unpin)
        ready = [
            block for block in blocks if block.ref_cnt <= ours[block.block_id] or self._held_elsewhere(block)
        ]
        waiting = {block.block_id for block in blocks} - {block.block_id for block in ready}
        self._to_unpin = [block_id for block_id in self._to_unpin if block_id in waiting]
        self._pool.unpin_blocks(ready, self._on_reuse)

    def _held_elsewhere(self, block: KVCacheBlock) -> bool:
        """A block with a prefix-cache hash may wait for nobody: whoever frees it last puts it at the tail."""
        return block.block_hash is not None

    def handed_out(self, blocks: int) -> None:
        """The pool handed out at most `blocks`: keep the protected ones well behind the head of its free queue."""
        self._handed_out += blocks
        if self._handed_out * 2 >= self._ahead:
            self._refresh()

    def expect(self, blocks: int) -> None:
        """Before vLLM allocates up to `blocks` for a request: have it take every unprotected block first."""
        if self._handed_out + blocks > self._ahead:
            self._refresh()

    def _refresh(self) -> None:
        """Move protected blocks to the tail of the free queue, the most valuable last.

        What it gains are the unprotected blocks that were freed since the last time and stand behind the protected ones. At
        least one for every eight moves: under pressure the order of the last refresh stands, and the least valuable are
        taken first.
        """
        unprotected = max(0, self._pool.get_num_free_blocks() - len(self._protected))
        gain = unprotected - max(0, self._ahead - self._handed_out)
        if gain <= 0 or gain * 8 < len(self._protected):
            return
        now_s = time.monotonic()
        self._follow_peers(now_s)
        self._protected.expire(now_s)
        protected = [self._pool.blocks[block_id] for block_id in self._protected.order(now_s)]
        free = [block for block in protected if block.ref_cnt == 0]
        self._pool.touch(free)
        self._pool.unpin_blocks(free, self._on_reuse)
        self._ahead = max(0, self._pool.get_num_free_blocks() - len(free))
        self._handed_out = 0

    def report(self) -> None:
        """Carry the index thread's counts and the current holdings to the statistics."""
        self._follow_peers(time.monotonic())
        asked, lost, held = self._index.take_counts()
        for kind, count in asked.items():
            self._stats.record("index_requests", count, kind)
        for cause, count in lost.items():
            self._stats.record("lost_blocks", count, cause)
        protected = len(self._protected)
        self._stats.record("retained_tokens", protected * self._block_size, "protected")
        self._stats.record("retained_tokens", max(0, held - protected) * self._block_size, "soft")

    def _on_reuse(self, block: KVCacheBlock) -> None:
        self._index.reused(block.block_id)
        self._protected.lost(block.block_id)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.close()
