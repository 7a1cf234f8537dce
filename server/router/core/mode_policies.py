"""How a turn gets its prompt's KV: policies to choose from, each a pure function of a `ModeView`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.router.core.choices import Mode, ModeReason

if TYPE_CHECKING:
    from bidikv_server.router.core.choices import ModeView


def readback(_view: ModeView) -> tuple[Mode, ModeReason]:
    """Prefill always asks; how much it pulls is its own choice, made token by token."""
    return Mode.READBACK, ModeReason.FIXED


@dataclass(frozen=True, slots=True)
class Cheapest:
    """What takes least time to the first token by what was measured lately; readback while that is not known.

    Decode may do a turn alone only if it lacks few tokens and keeps nobody waiting: while it computes a prompt, every answer
    that it streams stands still, which the time to this turn's first token does not show.

    Attributes:
        alone_tokens: How many tokens decode may compute at most.
        gain: By what share another way must be faster than readback.
    """

    alone_tokens: int = 256
    gain: float = 0.1

    def __call__(self, view: ModeView) -> tuple[Mode, ModeReason]:
        """The cheapest way that is open."""
        if view.readback_s is None:
            return Mode.READBACK, ModeReason.UNKNOWN_COSTS
        ways = {Mode.READBACK: view.readback_s * (1 - self.gain)}
        if view.recompute_s is not None:
            ways[Mode.RECOMPUTE] = view.recompute_s
        if view.alone_s is not None and self._spares(view):
            ways[Mode.ALONE] = view.alone_s
        return min(ways, key=lambda way: ways[way]), ModeReason.CHEAPER

    def _spares(self, view: ModeView) -> bool:
        return view.waiting == 0 and view.new_tokens is not None and view.new_tokens <= self.alone_tokens
