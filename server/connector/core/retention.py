"""The retention index of one decode engine: which block holds which proven prefix, and until when.

Retention is soft. The index owns no block: decode's block pool may hand any of them out at any time and tells the
index when it does (`reused`). A reader therefore gets each block's generation with the block and asks again after
its read (`valid`): an unchanged generation proves that the bytes it read were the bytes it was promised.

Not thread-safe; the caller holds one lock around every call. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.connector.core.deadlines import Deadlines
from bidikv_server.connector.core.memory import Turn, TurnMemory
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
    # The list of deadlines that will look at this entry. Any other list leaves it alone.
    deadline: int


class RetentionIndex:
    """Digest to block, with generations, expiry and the memory of what was lost and why."""

    def __init__(self, num_blocks: int) -> None:
        """Serve a block pool of `num_blocks` blocks."""
        self._generations = [0] * num_blocks
        self._entries: dict[bytes, _Entry] = {}
        self._digests_of: dict[int, set[bytes]] = {}
        # Who retained what is held, both ways round: so that a conversation can be released.
        self._holders: dict[bytes, set[str]] = {}
        self._held_by: dict[str, dict[bytes, None]] = {}
        self._deadlines = Deadlines()
        self._listed_limit = 8 * num_blocks
        self._memory = TurnMemory(4 * num_blocks)

    def __len__(self) -> int:
        """Digests held."""
        return len(self._entries)

    def __repr__(self) -> str:
        return (
            f"<RetentionIndex digests={len(self._entries)} blocks={len(self._digests_of)} "
            f"holders={len(self._held_by)} {self._memory!r}>"
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
        complete: bool = True,
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
            complete: Whether the turn certainly ended well. One that may not have explains later prompts of its
                conversation only where no complete one does.
            keep: Blocks whose digests do not move to a newer block.
        """
        expires_at_s = now_s + ttl_s
        # What is held already has a deadline, which will find out that it was put off.
        deadline = self._deadlines.add(expires_at_s, tuple(d for d in digests if d not in self._entries))
        for digest, block_id in zip(digests, block_ids, strict=True):
            held = self._entries.get(digest)
            if held is None:
                self._entries[digest] = _Entry(block_id, expires_at_s, deadline)
                self._digests_of.setdefault(block_id, set()).add(digest)
                self._memory.found(digest)
            else:
                held.expires_at_s = max(held.expires_at_s, expires_at_s)
                if held.block_id != block_id and held.block_id not in keep:
                    self._unlink(digest, held)
                    held.block_id = block_id
                    self._digests_of.setdefault(block_id, set()).add(digest)
            self._holders.setdefault(digest, set()).add(conversation)
        if digests:
            self._held_by.setdefault(conversation, {}).update(dict.fromkeys(digests))
        self._memory.remember(conversation, Turn(tuple(digests), tokens, ttl_s, complete))
        if len(self._deadlines) > self._listed_limit + 2 * len(self._entries):
            self._deadlines.compact(self._watches)

    def renew(self, conversation: str, *, now_s: float, ttl_s: float | None = None) -> bool:
        """The conversation is alive: keep what its last turn left for another `ttl_s`, by default that turn's own.

        Returns whether there was anything to keep. Never makes an expiry earlier.
        """
        turn = self._memory.get(conversation)
        if turn is None:
            return False
        expires_at_s = now_s + (turn.ttl_s if ttl_s is None else ttl_s)
        held = [
            entry for entry in map(self._entries.get, turn.digests) if entry and entry.expires_at_s > now_s
        ]
        for entry in held:
            entry.expires_at_s = max(entry.expires_at_s, expires_at_s)
        return bool(held)

    def release(self, conversation: str) -> bool:
        """The conversation has ended: drop what it retained and no other did. Returns whether it was known."""
        known = self._memory.forget(conversation)
        for digest in self._held_by.pop(conversation, {}):
            known = True
            self._holders[digest].discard(conversation)
            if not self._holders[digest]:
                self._drop(digest, Reason.RELEASED)
        return known

    def reused(self, block_id: int) -> None:
        """Decode's pool handed this block out: nothing read from it after this moment may be believed."""
        self._generations[block_id] += 1
        for digest in tuple(self._digests_of.get(block_id, ())):
            self._drop(digest, Reason.EVICTED)

    def take_losses(self) -> dict[str, int]:
        """Digests lost since the last call, by cause."""
        return self._memory.take_losses()

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
                self._drop(digest, Reason.EXPIRED)
                break
            block_ids.append(entry.block_id)
        if block_ids:
            self.renew(conversation, now_s=now_s)
        generations = tuple(self._generations[block_id] for block_id in block_ids)
        return Match(
            tuple(block_ids), generations, *self._memory.explain(conversation, digests, len(block_ids))
        )

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
                self._drop(digest, Reason.EXPIRED)
            at_s = min((self._entries[digest].expires_at_s for digest in later), default=now_s)
            self._deadlines.add(at_s, later, number=number)
        return looked

    def check_integrity(self) -> None:
        """Recompute everything that is kept twice.

        Raises:
            RuntimeError: Two views disagree, or an entry would never expire.
        """
        reverse: dict[int, set[bytes]] = {}
        for digest, entry in self._entries.items():
            reverse.setdefault(entry.block_id, set()).add(digest)
        if reverse != self._digests_of:
            raise RuntimeError(f"entries and blocks disagree: {self!r}")
        held = {(digest, name) for name, digests in self._held_by.items() for digest in digests}
        if held != {(digest, name) for digest, names in self._holders.items() for name in names}:
            raise RuntimeError(f"holders and what they hold disagree: {self!r}")
        if self._holders.keys() != self._entries.keys() or not all(self._held_by.values()):
            raise RuntimeError(f"a digest without a holder, or a holder without a digest: {self!r}")
        watched = set(self._deadlines)
        if any((entry.deadline, digest) not in watched for digest, entry in self._entries.items()):
            raise RuntimeError(f"an entry would never expire: {self!r}")
        self._memory.check_integrity()

    def _watches(self, deadline: int, digest: bytes) -> bool:
        """Whether it is this deadline that ends a digest's entry."""
        entry = self._entries.get(digest)
        return entry is not None and entry.deadline == deadline

    def _drop(self, digest: bytes, reason: Reason) -> None:
        self._unlink(digest, self._entries.pop(digest))
        for conversation in self._holders.pop(digest):
            held_by = self._held_by[conversation]
            del held_by[digest]
            if not held_by:
                del self._held_by[conversation]
        self._memory.lost(digest, reason)

    def _unlink(self, digest: bytes, entry: _Entry) -> None:
        digests = self._digests_of[entry.block_id]
        digests.discard(digest)
        if not digests:
            del self._digests_of[entry.block_id]
