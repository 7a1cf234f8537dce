"""Protected retention: which conversations' blocks decode holds on to, within a budget, and which it gives up first.

Pure bookkeeping over block ids. The caller owns the block pool and does what the returned lists say: a block in `pin`
keeps the reference it was just given, a block in `unpin` loses one. Blocks that several conversations share are held
once. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@dataclass(frozen=True, slots=True)
class Change:
    """What to do with the pool's references."""

    pin: frozenset[int] = field(default=frozenset())
    unpin: frozenset[int] = field(default=frozenset())


class ProtectedSet:
    """All holdings of one engine, never more than `budget_blocks` blocks."""

    def __init__(self, budget_blocks: int) -> None:
        """Hold nothing yet."""
        self._budget_blocks = budget_blocks
        self._holdings: dict[str, Holding] = {}
        self._holders: Counter[int] = Counter()

    def __len__(self) -> int:
        """Blocks held, shared ones once."""
        return len(self._holders)

    def __repr__(self) -> str:
        return f"<ProtectedSet conversations={len(self._holdings)} blocks={len(self)}/{self._budget_blocks}>"

    def admit(self, holding: Holding, *, now_s: float) -> Change:
        """Protect a finished turn in place of its conversation's earlier one, and stay within the budget."""
        before = set(self._holders)
        self._remove(holding.conversation)
        kept = holding.block_ids[: self._budget_blocks]
        if kept:
            self._add(replace(holding, block_ids=kept))
        self._expire(now_s)
        self._give_up(len(self) - self._budget_blocks, now_s)
        return self._change_since(before)

    def release(self, conversation: str) -> Change:
        """Stop protecting a conversation."""
        before = set(self._holders)
        self._remove(conversation)
        return self._change_since(before)

    def release_all(self) -> Change:
        """Stop protecting anything."""
        before = set(self._holders)
        self._holdings.clear()
        self._holders.clear()
        return self._change_since(before)

    def expire(self, now_s: float) -> Change:
        """Stop protecting what did not come back in time."""
        before = set(self._holders)
        self._expire(now_s)
        return self._change_since(before)

    def give_up(self, blocks: int, *, now_s: float) -> Change:
        """Make at least `blocks` blocks free, or all there are: least valuable conversation first, its tail first."""
        before = set(self._holders)
        self._expire(now_s)
        self._give_up(blocks - (len(before) - len(self)), now_s)
        return self._change_since(before)

    def check_integrity(self) -> None:
        """Recount the holders.

        Raises:
            RuntimeError: The count is off, or the budget is exceeded.
        """
        recount: Counter[int] = Counter()
        for holding in self._holdings.values():
            recount.update(set(holding.block_ids))
        if recount != self._holders or len(self) > self._budget_blocks:
            raise RuntimeError(f"protected set is inconsistent: {self!r}")

    def _expire(self, now_s: float) -> None:
        for conversation in [h.conversation for h in self._holdings.values() if h.expires_at_s <= now_s]:
            self._remove(conversation)

    def _give_up(self, blocks: int, now_s: float) -> None:
        target = len(self) - blocks
        for holding in sorted(self._holdings.values(), key=lambda h: (h.value(now_s), h.conversation)):
            if len(self) <= target:
                return
            self._remove(holding.conversation)
            if len(self) > target:
                continue
            # Every block of a prefix needs those before it, so it is shortened from the end.
            keep = self._longest_fitting(holding.block_ids, target)
            if keep:
                self._add(replace(holding, block_ids=holding.block_ids[:keep]))

    def _longest_fitting(self, block_ids: Sequence[int], target: int) -> int:
        """How many leading blocks may stay with at most `target` blocks held in all."""
        room = target - len(self)
        for count, block_id in enumerate(block_ids):
            if block_id not in self._holders:
                if room <= 0:
                    return count
                room -= 1
        return len(block_ids)

    def _add(self, holding: Holding) -> None:
        self._holdings[holding.conversation] = holding
        self._holders.update(set(holding.block_ids))

    def _remove(self, conversation: str) -> None:
        holding = self._holdings.pop(conversation, None)
        if holding is None:
            return
        for block_id in set(holding.block_ids):
            self._holders[block_id] -= 1
            if not self._holders[block_id]:
                del self._holders[block_id]

    def _change_since(self, before: set[int]) -> Change:
        now = set(self._holders)
        return Change(frozenset(now - before), frozenset(before - now))
