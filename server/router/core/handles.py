"""Handles that stock decode engines return when a turn ends: kept, proven and given away once.

Stock vLLM reads blocks by position and compares nothing, and the first read frees them. So a handle leaves the book at most
once, before its blocks expire, only for a request of the same conversation whose messages append to the turn, and only as
far as the tokens of that request are, block by block, those that decode computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bidikv_server.router.core.digests import Digest
    from bidikv_server.router.core.ids import ConversationKey, EngineUrl


@dataclass(frozen=True, slots=True)
class Handle:
    """What one decode engine holds of one turn.

    Attributes:
        engine: The engine.
        params: `kv_transfer_params` as it returned them.
        block_size: Its block size, in tokens.
        blocks: Rolling digests of the tokens in its whole blocks.
        whole: To be used only if all of it can be: nothing but the tokens says that a request appends.
    """

    engine: EngineUrl
    params: Mapping[str, Any]
    block_size: int
    blocks: tuple[bytes, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class _Entry:
    handle: Handle
    expires_s: float


class HandleBook:
    """Bounded memory of handles: the oldest goes first. Times are seconds on one monotonic clock of the caller."""

    def __init__(self, *, max_handles: int, ttl_s: float) -> None:
        self._max_handles = max_handles
        self._ttl_s = ttl_s
        self._entries: OrderedDict[tuple[ConversationKey, Digest], _Entry] = OrderedDict()
        self._held: dict[ConversationKey, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, key: ConversationKey, appended_to: Digest, handle: Handle, now_s: float) -> None:
        """Keep a turn's handle.

        Args:
            key: The turn's conversation.
            appended_to: The digest that the prompt of every append has among its prefixes, and no other prompt.
            handle: What decode returned.
            now_s: When it did, or earlier.
        """
        self.expire(now_s)
        self._drop((key, appended_to))
        self._entries[key, appended_to] = _Entry(handle, now_s + self._ttl_s)
        self._held[key] = self._held.get(key, 0) + 1
        while len(self._entries) > self._max_handles:
            self._drop(next(iter(self._entries)))

    def take(self, key: ConversationKey, prefixes: Sequence[Digest], now_s: float) -> Handle | Reason:
        """Give away the handle of the latest turn that a request appends to, or say why there is none.

        Args:
            key: The request's conversation.
            prefixes: Digests that its prompt passes on its way, shortest first.
            now_s: Now.
        """
        held = self._held.get(key, 0)
        expired = False
        for digest in reversed(prefixes):
            entry = self._drop((key, digest))
            if entry is not None and now_s < entry.expires_s:
                self.expire(now_s)
                return entry.handle
            expired = expired or entry is not None
        self.expire(now_s)
        if expired:
            return Reason.EXPIRED
        return Reason.DIVERGED if held else Reason.NOT_RETAINED

    def drop_engine(self, engine: EngineUrl) -> None:
        """Forget what an engine held: it is down, and comes back with nothing."""
        for place in [place for place, entry in self._entries.items() if entry.handle.engine == engine]:
            self._drop(place)

    def expire(self, now_s: float) -> None:
        """Forget handles whose time is up."""
        while self._entries:
            place, entry = next(iter(self._entries.items()))
            if now_s < entry.expires_s:
                return
            self._drop(place)

    def check_integrity(self) -> None:
        """Recompute counts and order.

        Raises:
            AssertionError: Two views of the book disagree.
        """
        counted: dict[ConversationKey, int] = {}
        for key, _ in self._entries:
            counted[key] = counted.get(key, 0) + 1
        assert counted == self._held, "counts and handles disagree"  # noqa: S101
        assert len(self) <= self._max_handles, "too many handles"  # noqa: S101
        times = [entry.expires_s for entry in self._entries.values()]
        assert times == sorted(times), "handles are not in order of time"  # noqa: S101

    def _drop(self, place: tuple[ConversationKey, Digest]) -> _Entry | None:
        entry = self._entries.pop(place, None)
        if entry is not None:
            key, _ = place
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
        return entry


def block_digests(token_ids: Sequence[int], block_size: int, tokens: int) -> tuple[bytes, ...]:
    """Rolling digests of the whole blocks among the first `tokens` of a sequence."""
    data = array("q", token_ids[:tokens]).tobytes()
    width = block_size * array("q").itemsize
    digests: list[bytes] = []
    previous = b""
    for end in range(width, len(data) + 1, width):
        previous = hashlib.blake2b(previous + data[end - width : end], digest_size=16).digest()
        digests.append(previous)
    return tuple(digests)


def proven_blocks(handle: Handle, token_ids: Sequence[int]) -> int:
    """How many of its leading blocks hold just what a prompt of these tokens begins with.

    One token of the prompt is left to compute. 0 if the handle is to be used whole and cannot be.
    """
    found = block_digests(token_ids, handle.block_size, len(token_ids) - 1)
    common = 0
    for ours, theirs in zip(found, handle.blocks, strict=False):
        if ours != theirs:
            break
        common += 1
    return 0 if handle.whole and common < len(handle.blocks) else common


def first_blocks(handle: Handle, blocks: int) -> dict[str, Any]:
    """Its `kv_transfer_params` for a prefill leg, cut to its leading blocks.

    Vllm aligns the blocks it needs with the end of the list. So the list ends with the last proven block, even where
    all are proven: decode may have allocated one more than it filled.
    """
    ((*block_ids,),) = handle.params["remote_block_ids"]
    return {
        **handle.params,
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [block_ids[:blocks]],
        "remote_num_tokens": blocks * handle.block_size,
    }
