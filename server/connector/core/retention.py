"""The retention index of one decode engine: which block holds which proven prefix, and until when.

Retention is soft. The index owns no block: decode's block pool may hand any of them out at any time and tells the
index when it does (`reused`). A reader therefore gets each block's generation with the block and asks again after
its read (`valid`): an unchanged generation proves that the bytes it read were the bytes it was promised.

Not thread-safe; the caller holds one lock around every call. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """The longest proven prefix that is still held.

    Attributes:
        block_ids: Decode's block of each matched digest, in order.
        generations: Generation of each of those blocks at lookup time.
        reason: HIT when nothing this conversation retained was lost, else why the match is no longer than it is.
    """

    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    reason: Reason


@dataclass(slots=True)
class _Entry:
    block_id: int
    expires_at_s: float


class RetentionIndex:
    """Digest to block, with generations, expiry and the memory of what was lost and why."""

    def __init__(self, num_blocks: int) -> None:
        """Serve a block pool of `num_blocks` blocks."""
        self._generations = [0] * num_blocks
        self._entries: dict[bytes, _Entry] = {}
        self._digests_of: dict[int, set[bytes]] = {}
        # Last retained turn of each conversation, and digests that were lost: only to say why a lookup missed.
        self._turns: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()
        self._lost: OrderedDict[bytes, Reason] = OrderedDict()
        self._memory_limit = 4 * num_blocks
        self._turn_blocks = 0
        self._users: Counter[bytes] = Counter()
        self._losses: Counter[str] = Counter()

    def __len__(self) -> int:
        """Digests held."""
        return len(self._entries)

    def __repr__(self) -> str:
        return (
            f"<RetentionIndex digests={len(self._entries)} blocks={len(self._digests_of)} "
            f"conversations={len(self._turns)} lost={len(self._lost)}>"
        )

    def retain(
        self,
        conversation: str,
        digests: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        now_s: float,
        ttl_s: float,
    ) -> None:
        """Record a finished turn: `block_ids[i]` holds the block that `digests[i]` names.

        A digest that is already held moves to the newer block and never to an earlier expiry.
        """
        expires_at_s = now_s + ttl_s
        for digest, block_id in zip(digests, block_ids, strict=True):
            held = self._entries.get(digest)
            if held is not None:
                expires_at_s_of_held = max(held.expires_at_s, expires_at_s)
                self._unlink(digest, held)
            else:
                expires_at_s_of_held = expires_at_s
            self._entries[digest] = _Entry(block_id, expires_at_s_of_held)
            self._digests_of.setdefault(block_id, set()).add(digest)
            self._lost.pop(digest, None)
        self._remember_turn(conversation, tuple(digests))

    def reused(self, block_id: int) -> None:
        """Decode's pool handed this block out: nothing read from it after this moment may be believed."""
        self._generations[block_id] += 1
        for digest in self._digests_of.pop(block_id, set()):
            del self._entries[digest]
            self._remember_loss(digest, Reason.EVICTED)

    def release(self, conversation: str) -> None:
        """The conversation has ended: drop what no other remembered turn is made of."""
        for digest in self._forget_turn(conversation):
            entry = self._entries.get(digest)
            if entry is not None and not self._users[digest]:
                self._drop(digest, entry, Reason.RELEASED)

    def take_losses(self) -> dict[str, int]:
        """Digests lost since the last call, by cause."""
        losses, self._losses = self._losses, Counter()
        return dict(losses)

    def lookup(self, conversation: str, digests: Sequence[bytes], *, now_s: float) -> Match:
        """Find the longest prefix of `digests` that is held, in order and unexpired. Drops what has expired."""
        block_ids: list[int] = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None:
                break
            if entry.expires_at_s <= now_s:
                self._drop(digest, entry, Reason.EXPIRED)
                break
            block_ids.append(entry.block_id)
        generations = tuple(self._generations[block_id] for block_id in block_ids)
        return Match(tuple(block_ids), generations, self._explain(conversation, digests, len(block_ids)))

    def valid(self, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether none of these blocks was handed out since the lookup that returned these generations."""
        if len(block_ids) != len(generations):
            return False
        return all(
            0 <= block_id < len(self._generations) and self._generations[block_id] == generation
            for block_id, generation in zip(block_ids, generations, strict=True)
        )

    def expire(self, now_s: float) -> int:
        """Drop every expired entry; returns how many."""
        expired = [(digest, entry) for digest, entry in self._entries.items() if entry.expires_at_s <= now_s]
        for digest, entry in expired:
            self._drop(digest, entry, Reason.EXPIRED)
        return len(expired)

    def check_integrity(self) -> None:
        """Recompute the reverse map.

        Raises:
            RuntimeError: The two maps disagree.
        """
        reverse: dict[int, set[bytes]] = {}
        for digest, entry in self._entries.items():
            reverse.setdefault(entry.block_id, set()).add(digest)
        if reverse != self._digests_of:
            raise RuntimeError(f"retention index is inconsistent: {self!r}")
        users = Counter(digest for turn in self._turns.values() for digest in turn)
        if users != self._users or self._turn_blocks != sum(map(len, self._turns.values())):
            raise RuntimeError(f"turn memory is miscounted: {self!r}")

    def _explain(self, conversation: str, digests: Sequence[bytes], matched: int) -> Reason:
        if matched == len(digests):
            return Reason.HIT
        lost = self._lost.get(digests[matched])
        if lost is not None:
            return lost
        turn = self._turns.get(conversation)
        if turn is None:
            return Reason.HIT if matched else Reason.NOT_RETAINED
        return Reason.HIT if matched >= len(turn) and matched else Reason.DIVERGED

    def _drop(self, digest: bytes, entry: _Entry, reason: Reason) -> None:
        del self._entries[digest]
        self._unlink(digest, entry)
        self._remember_loss(digest, reason)

    def _unlink(self, digest: bytes, entry: _Entry) -> None:
        digests = self._digests_of[entry.block_id]
        digests.discard(digest)
        if not digests:
            del self._digests_of[entry.block_id]

    def _remember_loss(self, digest: bytes, reason: Reason) -> None:
        self._losses[reason] += 1
        self._lost[digest] = reason
        if len(self._lost) > self._memory_limit:
            self._lost.popitem(last=False)

    def _remember_turn(self, conversation: str, digests: tuple[bytes, ...]) -> None:
        self._forget_turn(conversation)
        self._turns[conversation] = digests
        self._turn_blocks += len(digests)
        self._users.update(digests)
        while self._turn_blocks > self._memory_limit and len(self._turns) > 1:
            self._forget_turn(next(iter(self._turns)))

    def _forget_turn(self, conversation: str) -> tuple[bytes, ...]:
        digests = self._turns.pop(conversation, ())
        self._turn_blocks -= len(digests)
        for digest in digests:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
        return digests
