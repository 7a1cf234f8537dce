"""Blocks that an overdue read may still write to: out of circulation until every rank says that its read has stopped.

A transport's release of a transfer under way is no promise that it stopped (NIXL's UCX backend cancels and reports success
either way), so the request goes on without these blocks instead of waiting for them. Engine core thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Quarantine:
    """One reference on each block, taken before vLLM gives the request's own up."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._pool: BlockPool | None = None
        self._held: dict[str, tuple[list[KVCacheBlock], int]] = {}

    def bind(self, block_pool: BlockPool) -> None:
        """Take vLLM's block pool; called before the first request."""
        self._pool = block_pool

    def __len__(self) -> int:
        """Requests whose blocks are held."""
        return len(self._held)

    def hold(self, request_id: str, block_ids: Sequence[int], ranks: int) -> None:
        """`ranks` more ranks may still write to a request's blocks."""
        blocks, waiting = self._held.get(request_id, ([], 0))
        if not blocks and self._pool is not None:
            blocks = [self._pool.blocks[block_id] for block_id in block_ids]
            self._pool.touch(blocks)
        self._held[request_id] = (blocks, waiting + ranks)

    def release(self, request_id: str, ranks: int) -> None:
        """`ranks` ranks have stopped; after the last one the blocks go back to the pool."""
        blocks, waiting = self._held.pop(request_id, ([], 0))
        if waiting > ranks:
            self._held[request_id] = (blocks, waiting - ranks)
        elif blocks and self._pool is not None:
            self._pool.free_blocks(reversed(blocks))
