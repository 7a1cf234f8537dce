"""Decode's scheduler side: retain finished turns softly, and answer lookups about them."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from bidikv_server.connector import messages, requests
from bidikv_server.connector.core import digests, readback
from bidikv_server.connector.core.retention import RetentionIndex
from bidikv_server.connector.side_channel import Server

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from bidikv_server.connector.config import ConnectorConfig

logger = logging.getLogger("vllm.bidikv")


class DecodeRetention:
    """Owns the retention index. `answer` runs on the index thread, everything else on the engine core's."""

    def __init__(
        self, config: ConnectorConfig, identity: str, block_size: int, rank: int, connection: dict[str, Any]
    ) -> None:
        """Keep what is needed to serve; the port opens in `bind`, when there is something to serve."""
        self._config = config
        self._identity = identity
        self._block_size = block_size
        self._rank = rank
        self._connection = connection
        # Generations start anew with every engine start; the epoch tells readers which start they belong to.
        self._epoch = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._pool: BlockPool | None = None
        self._index: RetentionIndex | None = None
        self._server: Server | None = None
        self._pinned: list[KVCacheBlock] = []

    def bind(self, block_pool: BlockPool) -> None:
        """Take the block pool and start listening.

        Raises:
            OSError: The index port is taken.
        """
        self._pool = block_pool
        self._index = RetentionIndex(block_pool.num_gpu_blocks)
        host = self._config.index_host
        port = self._config.index_port + self._rank
        self._server = Server(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            self.answer,
            secret=self._config.secret.get_secret_value(),
        )
        logger.info(
            "bidikv: retention index on %s, TTL %g s",
            self._server.address,
            self._config.decoder_kv_blocks_ttl,
        )

    def retain(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Record a finished turn, if it is one of a known conversation and can be proven.

        The blocks are referenced until `settle`, after vLLM has freed the request.
        """
        leg = requests.LegParams.of(request)
        if leg is None or leg.retain_s <= 0 or self._pool is None or self._index is None:
            return
        if not requests.provable(request):
            return
        tokens = request.all_token_ids
        count = readback.retainable_blocks(
            all_tokens=len(tokens),
            computed_tokens=request.num_computed_tokens,
            in_flight_tokens=request.num_in_flight_tokens,
            block_size=self._block_size,
            block_ids=block_ids[0],
        )
        blocks = [self._pool.blocks[block_id] for block_id in block_ids[0][:count]]
        if any(block.is_null for block in blocks):
            return
        chain = digests.chain(
            requests.seed(request, leg, self._identity), tokens, block_size=self._block_size, blocks=count
        )
        ttl_s = min(leg.retain_s, self._config.decoder_kv_blocks_ttl)
        self._pool.touch(blocks)
        self._pinned.extend(blocks)
        with self._lock:
            self._index.retain(
                leg.conversation, chain, block_ids[0][:count], now_s=time.monotonic(), ttl_s=ttl_s
            )

    def settle(self) -> None:
        """Turn references into soft retention: the blocks count as free and are handed out last.

        This runs at the next hook after the request was freed. Unpinning in `retain` would leave the request as the
        last holder, and its free puts blocks that carry no prefix-cache hash at the front of the free queue.
        """
        if self._pinned and self._pool is not None:
            pinned, self._pinned = self._pinned, []
            # The first blocks of a prefix are worth most, so they join the queue last.
            self._pool.unpin_blocks(reversed(pinned), self._on_reuse)

    def _on_reuse(self, block: KVCacheBlock) -> None:
        if self._index is not None:
            with self._lock:
                self._index.reused(block.block_id)

    def answer(self, data: bytes) -> bytes | None:
        """Serve one message on the index thread; malformed ones get no answer."""
        message = messages.decode(data)
        if isinstance(message, messages.Lookup | messages.Validate) and message.v != messages.VERSION:
            return messages.encode(
                messages.Refused(
                    messages.VERSION, f"decode speaks version {messages.VERSION}, prefill {message.v}"
                )
            )
        if isinstance(message, messages.Lookup):
            return self._answer_lookup(message)
        if isinstance(message, messages.Validate):
            return self._answer_validate(message)
        return None

    def _answer_lookup(self, message: messages.Lookup) -> bytes | None:
        wanted = messages.split_digests(message.digests)
        if wanted is None or self._index is None:
            return None
        if message.identity != self._identity:
            return messages.encode(
                messages.Refused(
                    messages.VERSION, "the engines differ in model, dtype, block size or speculation"
                )
            )
        with self._lock:
            match = self._index.lookup(message.conversation, wanted, now_s=time.monotonic())
        return messages.encode(
            messages.Found(
                v=messages.VERSION,
                epoch=self._epoch,
                block_ids=list(match.block_ids),
                generations=list(match.generations),
                reason=match.reason,
                **self._connection,
            )
        )

    def _answer_validate(self, message: messages.Validate) -> bytes:
        valid = message.epoch == self._epoch and self._index is not None
        if valid and self._index is not None:
            with self._lock:
                valid = self._index.valid(message.block_ids, message.generations)
        return messages.encode(messages.Verdict(messages.VERSION, valid))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
