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

from bidikv_server.connector.core.deadlines import Deadlines
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """The longest proven prefix that is still held.

    Attributes:
        block_ids: Decode's block of each matched digest, in order.
        generations: Generation of each of those blocks at lookup time.
        reason: HIT when nothing this conversation retained was lost, else why the match is no longer than it is.
        retained: When it diverged: the packed tokens of the conversation's own block at the place where the match ends.
    """

    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    reason: Reason
    retained: bytes = b""


@dataclass(slots=True)
class _Entry:
    block_id: int
    expires_at_s: float
    # The deadline that will look at this entry; an older turn's deadline leaves it alone.
    deadline: int


@dataclass(frozen=True, slots=True)
class _Turn:
    digests: tuple[bytes, ...]
    tokens: bytes
    ttl_s: float


class RetentionIndex:
    """Digest to block, with generations, expiry and the memory of what was lost and why."""

    def __init__(self, num_blocks: int) -> None:
        """Serve a block pool of `num_blocks` blocks."""
        self._generations = [0] * num_blocks
        self._entries: dict[bytes, _Entry] = {}
        self._digests_of: dict[int, set[bytes]] = {}
        # Last retained turn of each conversation, and digests that were lost: only to say why a lookup missed.
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._lost: OrderedDict[bytes, Reason] = OrderedDict()
        self._memory_limit = 4 * num_blocks
        self._turn_blocks = 0
        self._users: Counter[bytes] = Counter()
        self._losses: Counter[str] = Counter()
        self._deadlines = Deadlines()

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
        tokens: bytes = b"",
        supersede: bool = True,
        keep: Container[int] = (),
    ) -> None:
        """Record a finished turn: `block_ids[i]` holds the block that `digests[i]` names.

        A digest that is already held moves to the newer block and never to an earlier expiry.

        Args:
            conversation: Opaque key.
            digests: In prompt order.
            block_ids: As many.
            now_s: The caller's clock.
            ttl_s: How long.
            tokens: The blocks' packed tokens, to say where a later prompt diverges; may be empty.
            supersede: Whether later prompts of the conversation are explained by this turn instead of the one before.
            keep: Blocks whose digests do not move to a newer block.
        """
        deadline = self._deadlines.add(now_s + ttl_s, tuple(digests))
        for digest, block_id in zip(digests, block_ids, strict=True):
            held = self._entries.get(digest)
            expires_at_s = now_s + ttl_s
            if held is not None:
                expires_at_s = held.expires_at_s = max(held.expires_at_s, expires_at_s)
                if held.block_id in keep:
                    continue
                self._unlink(digest, held)
            self._entries[digest] = _Entry(block_id, expires_at_s, deadline)
            self._digests_of.setdefault(block_id, set()).add(digest)
            self._lost.pop(digest, None)
        if supersede:
            self._remember_turn(conversation, _Turn(tuple(digests), tokens, ttl_s))
        if len(self._deadlines) > 2 * (self._memory_limit + len(self._entries)):
            self._deadlines.compact(self._watches)

    def renew(self, conversation: str, *, now_s: float, ttl_s: float | None = None) -> bool:
        """The conversation is alive: keep what its last turn left for another `ttl_s`, by default that turn's own.

        Returns whether there was anything to keep. Never makes an expiry earlier.
        """
        turn = self._turns.get(conversation)
        if turn is None:
            return False
        expires_at_s = now_s + (turn.ttl_s if ttl_s is None else ttl_s)
        held = [
            entry for entry in map(self._entries.get, turn.digests) if entry and entry.expires_at_s > now_s
        ]
        for entry in held:
            entry.expires_at_s = max(entry.expires_at_s, expires_at_s)
        return bool(held)

    def reused(self, block_id: int) -> None:
        """Decode's pool handed this block out: nothing read from it after this moment may be believed."""
        self._generations[block_id] += 1
        for digest in self._digests_of.pop(block_id, set()):
            del self._entries[digest]
            self._remember_loss(digest, Reason.EVICTED)

    def release(self, conversation: str) -> bool:
        """The conversation has ended: drop what no other remembered turn is made of. Whether it was known."""
        known = conversation in self._turns
        for digest in self._forget_turn(conversation):
            entry = self._entries.get(digest)
            if entry is not None and not self._users[digest]:
                self._drop(digest, entry, Reason.RELEASED)
        return known

    def take_losses(self) -> dict[str, int]:
        """Digests lost since the last call, by cause."""
        losses, self._losses = self._losses, Counter()
        return dict(losses)

    def lookup(self, conversation: str, digests: Sequence[bytes], *, now_s: float) -> Match:
        """Find the longest prefix of `digests` that is held, in order and unexpired. Drops what has expired.

        A conversation that finds something is alive: its turn is renewed.
        """
        block_ids: list[int] = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None:
                break
            if entry.expires_at_s <= now_s:
                self._drop(digest, entry, Reason.EXPIRED)
                break
            block_ids.append(entry.block_id)
        if block_ids:
            self.renew(conversation, now_s=now_s)
        generations = tuple(self._generations[block_id] for block_id in block_ids)
        reason = self._explain(conversation, digests, len(block_ids))
        retained = self._retained_block(conversation, len(block_ids)) if reason is Reason.DIVERGED else b""
        return Match(tuple(block_ids), generations, reason, retained)

    def valid(self, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether none of these blocks was handed out since the lookup that returned these generations."""
        if len(block_ids) != len(generations):
            return False
        return all(
            0 <= block_id < len(self._generations) and self._generations[block_id] == generation
            for block_id, generation in zip(block_ids, generations, strict=True)
        )

    def expire(self, now_s: float, *, limit: int) -> int:
        """Drop what has expired, looking at no more than `limit` digests; returns how many it looked at."""
        looked = 0
        while looked < limit and (due := self._deadlines.due(now_s, limit - looked)) is not None:
            number, digests = due
            looked += len(digests)
            watched = [digest for digest in digests if self._watches(number, digest)]
            later = tuple(digest for digest in watched if self._entries[digest].expires_at_s > now_s)
            for digest in set(watched).difference(later):
                self._drop(digest, self._entries[digest], Reason.EXPIRED)
            at_s = min((self._entries[digest].expires_at_s for digest in later), default=now_s)
            self._deadlines.add(at_s, later, number=number)
        return looked

    def _watches(self, deadline: int, digest: bytes) -> bool:
        """Whether it is this deadline that ends a digest's entry."""
        entry = self._entries.get(digest)
        return entry is not None and entry.deadline == deadline

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
        users = Counter(digest for turn in self._turns.values() for digest in turn.digests)
        if users != self._users or self._turn_blocks != sum(
            len(turn.digests) for turn in self._turns.values()
        ):
            raise RuntimeError(f"turn memory is miscounted: {self!r}")
        watched = set(self._deadlines)
        if any((entry.deadline, digest) not in watched for digest, entry in self._entries.items()):
            raise RuntimeError(f"an entry would never expire: {self!r}")

    def _explain(self, conversation: str, digests: Sequence[bytes], matched: int) -> Reason:
        if matched == len(digests):
            return Reason.HIT
        lost = self._lost.get(digests[matched])
        if lost is not None:
            return lost
        turn = self._turns.get(conversation)
        if turn is None:
            return Reason.HIT if matched else Reason.NOT_RETAINED
        return Reason.HIT if matched >= len(turn.digests) and matched else Reason.DIVERGED

    def _retained_block(self, conversation: str, block: int) -> bytes:
        """Packed tokens of one block of a conversation's last turn."""
        turn = self._turns[conversation]
        size = len(turn.tokens) // len(turn.digests) if turn.digests else 0
        return turn.tokens[block * size : (block + 1) * size]

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

    def _remember_turn(self, conversation: str, turn: _Turn) -> None:
        self._forget_turn(conversation)
        self._turns[conversation] = turn
        self._turn_blocks += len(turn.digests)
        self._users.update(turn.digests)
        while self._turn_blocks > self._memory_limit and len(self._turns) > 1:
            self._forget_turn(next(iter(self._turns)))

    def _forget_turn(self, conversation: str) -> tuple[bytes, ...]:
        turn = self._turns.pop(conversation, None)
        digests = turn.digests if turn is not None else ()
        self._turn_blocks -= len(digests)
        for digest in digests:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
        return digests
