"""What a retention index remembers only to say why a lookup missed: conversations' last turns and branches, and losses."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

_BRANCHES: Final = 32
"""Of one conversation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation's last turn.

    Attributes:
        digests: One per whole block.
        tokens: The blocks' packed tokens; may be empty.
        ttl_s: How long it was retained for.
        complete: Whether it certainly ended well.
    """

    digests: tuple[bytes, ...]
    tokens: bytes
    ttl_s: float
    complete: bool


class TurnMemory:
    """Bounded: the conversations that spoke longest ago, and the digests lost longest ago, are forgotten first."""

    def __init__(self, limit: int) -> None:
        """Remember turns of at most `limit` digests together, and as many lost ones."""
        self._limit = limit
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        # Where each branch of a conversation ends: its last digest, and the number of digests up to there.
        self._ends: dict[str, dict[bytes, int]] = {}
        self._digests = 0
        self._lost: OrderedDict[bytes, Reason] = OrderedDict()
        self._losses: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<TurnMemory conversations={len(self._turns)} lost={len(self._lost)}>"

    def get(self, conversation: str) -> Turn | None:
        """A conversation's last turn."""
        return self._turns.get(conversation)

    def remember(self, conversation: str, turn: Turn) -> None:
        """Note a conversation's last turn; one that may have been given up replaces none that ended well."""
        last = self._turns.get(conversation)
        if last is not None and last.complete and not turn.complete:
            return
        ends = self._ends_beside(conversation, turn.digests)
        self.forget(conversation)
        self._turns[conversation] = turn
        self._ends[conversation] = ends
        self._digests += len(turn.digests)
        while self._digests > self._limit and len(self._turns) > 1:
            self.forget(next(iter(self._turns)))

    def forget(self, conversation: str) -> bool:
        """Drop a conversation's turn; whether there was one."""
        turn = self._turns.pop(conversation, None)
        self._ends.pop(conversation, None)
        self._digests -= len(turn.digests) if turn is not None else 0
        return turn is not None

    def lost(self, digest: bytes, reason: Reason) -> None:
        """A digest can no longer be found."""
        self._losses[reason] += 1
        self._lost[digest] = reason
        if len(self._lost) > self._limit:
            self._lost.popitem(last=False)

    def found(self, digest: bytes) -> None:
        """A digest can be found again."""
        self._lost.pop(digest, None)

    def take_losses(self) -> dict[str, int]:
        """Digests lost since the last call, by cause."""
        losses, self._losses = self._losses, Counter()
        return dict(losses)

    def explain(self, conversation: str, digests: Sequence[bytes], matched: int) -> tuple[Reason, bytes]:
        """Why a match of `matched` digests is no longer, and if the prompt diverged, what was retained at its end."""
        if matched == len(digests):
            return Reason.HIT, b""
        lost = self._lost.get(digests[matched])
        if lost is not None:
            return lost, b""
        turn = self._turns.get(conversation)
        if turn is None:
            return Reason.HIT if matched else Reason.NOT_RETAINED, b""
        if matched >= len(turn.digests):
            return Reason.HIT if matched else Reason.DIVERGED, b""
        if matched and digests[matched - 1] in self._ends[conversation]:
            return Reason.HIT, b""  # it goes on where another branch ends: nobody changed anything
        size = len(turn.tokens) // len(turn.digests)
        return Reason.DIVERGED, turn.tokens[matched * size : (matched + 1) * size]

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            RuntimeError: The count is off.
        """
        if self._ends.keys() != self._turns.keys():
            raise RuntimeError(f"turns and branches disagree: {self!r}")
        if self._digests != sum(len(turn.digests) for turn in self._turns.values()):
            raise RuntimeError(f"turn memory is miscounted: {self!r}")

    def _ends_beside(self, conversation: str, digests: Sequence[bytes]) -> dict[bytes, int]:
        """Where a conversation's branches end once this turn is its last: those that it extends end there no more."""
        ends = {
            end: depth
            for end, depth in self._ends.get(conversation, {}).items()
            if depth > len(digests) or digests[depth - 1] != end
        }
        if digests:
            ends[digests[-1]] = len(digests)
        while len(ends) > _BRANCHES:
            del ends[next(iter(ends))]
        return ends
