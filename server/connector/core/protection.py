"""Protected retention: whose blocks decode's pool should hand out after every other, and in which order.

Pure bookkeeping over block ids: nothing here holds a reference. Protected blocks are free blocks that the caller keeps
moving to the tail of the pool's free queue, so a request that needs them simply takes them. Times are seconds on the
caller's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

MEDIAN_GAP_S: Final = 2.0
"""Half of an agent's next turns come within about this time (published traces of agents: 1.6 s)."""
CROSSOVER_TOKENS: Final = 4096
"""Context length at which attending to the past costs as much again as everything else about a token."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One conversation's protected blocks.

    Attributes:
        conversation: Opaque key.
        block_ids: In prompt order.
        since_s: When the turn ended.
        expires_at_s: When the promise to come back ends.
        tokens: Length of the whole turn, protected or not: what a recompute would have to attend to.
    """

    conversation: str
    block_ids: tuple[int, ...]
    since_s: float
    expires_at_s: float
    tokens: int

    def value(self, now_s: float) -> float:
        """Saved compute per block times the probability of a return; higher is kept longer.

        Gaps between an agent's turns are heavy-tailed: with survival m/(m+t), one that has not come after t seconds comes
        within the remaining r with probability r/(m+t+r).
        """
        elapsed_s = max(0.0, now_s - self.since_s)
        remaining_s = max(0.0, self.expires_at_s - now_s)
        returns = remaining_s / (MEDIAN_GAP_S + elapsed_s + remaining_s)
        return returns * (1 + self.tokens / CROSSOVER_TOKENS)


class _Held:
    """A holding of which the pool may have taken blocks: its first `length` blocks are left."""

    __slots__ = ("holding", "length", "places")

    def __init__(self, holding: Holding, length: int) -> None:
        self.holding = holding
        self.length = length
        self.places = {block_id: place for place, block_id in enumerate(holding.block_ids[:length])}

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.holding.block_ids[: self.length]


class ProtectedSet:
    """All holdings of one engine, never more than `budget_blocks` blocks; shared ones count once."""

    def __init__(self, budget_blocks: int) -> None:
        """Hold nothing yet."""
        self._budget_blocks = budget_blocks
        self._held: dict[str, _Held] = {}
        self._holders: dict[int, set[str]] = {}

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._holders)

    def __contains__(self, block_id: object) -> bool:
        """Whether a block is protected."""
        return block_id in self._holders

    def __repr__(self) -> str:
        return f"<ProtectedSet conversations={len(self._held)} blocks={len(self)}/{self._budget_blocks}>"

    def admit(self, holding: Holding, *, now_s: float) -> None:
        """Protect a finished turn in place of its conversation's earlier one, and stay within the budget.

        Over it, the least valuable conversation is shortened first, from its end: every block of a prefix needs those
        before it.
        """
        self.release(holding.conversation)
        self.expire(now_s)
        self._add(holding, min(len(holding.block_ids), self._budget_blocks))
        for victim in self._by_value(now_s):
            if len(self) <= self._budget_blocks:
                return
            left = victim.block_ids
            self._shorten(victim, 0)
            if len(self) <= self._budget_blocks:
                self._add(victim.holding, self._room_for(left))

    def release(self, conversation: str) -> None:
        """Stop protecting a conversation."""
        held = self._held.get(conversation)
        if held is not None:
            self._shorten(held, 0)

    def renew(self, conversation: str, expires_at_s: float, *, now_s: float) -> None:
        """The conversation said again when it comes back: its wait starts anew, and never ends earlier than before."""
        held = self._held.get(conversation)
        if held is not None:
            expires_at_s = max(expires_at_s, held.holding.expires_at_s)
            held.holding = replace(held.holding, since_s=now_s, expires_at_s=expires_at_s)

    def expire(self, now_s: float) -> None:
        """Stop protecting what did not come back in time."""
        for conversation, held in list(self._held.items()):
            if held.holding.expires_at_s <= now_s:
                self.release(conversation)

    def lost(self, block_id: int) -> None:
        """The pool handed this block out; what follows it in a prefix is of no use any more.

        Runs while the pool hands out blocks: the work is that of the blocks that go, each once.
        """
        for conversation in list(self._holders.get(block_id, ())):
            held = self._held[conversation]
            self._shorten(held, held.places[block_id])

    def order(self, now_s: float) -> list[int]:
        """Every protected block once, least worth keeping first: by conversation, and each from its end."""
        ordered: dict[int, None] = {}
        for held in reversed(self._by_value(now_s)):
            # Most valuable first, so that a shared block takes the place of its most valuable holder.
            ordered.update(dict.fromkeys(held.block_ids))
        return list(reversed(ordered))

    def check_integrity(self) -> None:
        """Recount the holders.

        Raises:
            RuntimeError: The count is off, or the budget is exceeded.
        """
        recount: dict[int, set[str]] = {}
        for conversation, held in self._held.items():
            for block_id in held.block_ids:
                recount.setdefault(block_id, set()).add(conversation)
        if (
            recount != self._holders
            or len(self) > self._budget_blocks
            or not all(held.length for held in self._held.values())
        ):
            raise RuntimeError(f"protected set is inconsistent: {self!r}")

    def _by_value(self, now_s: float) -> list[_Held]:
        return sorted(
            self._held.values(), key=lambda held: (held.holding.value(now_s), held.holding.conversation)
        )

    def _room_for(self, block_ids: tuple[int, ...]) -> int:
        """How many leading blocks fit into what is left of the budget."""
        room = self._budget_blocks - len(self)
        for count, block_id in enumerate(block_ids):
            if block_id not in self._holders:
                if room <= 0:
                    return count
                room -= 1
        return len(block_ids)

    def _add(self, holding: Holding, length: int) -> None:
        if not length:
            return
        held = self._held[holding.conversation] = _Held(holding, length)
        for block_id in held.block_ids:
            self._holders.setdefault(block_id, set()).add(holding.conversation)

    def _shorten(self, held: _Held, length: int) -> None:
        """Keep a holding's first `length` blocks only."""
        conversation = held.holding.conversation
        for block_id in held.holding.block_ids[length : held.length]:
            holders = self._holders[block_id]
            holders.discard(conversation)
            if not holders:
                del self._holders[block_id]
        held.length = length
        if not length:
            del self._held[conversation]
