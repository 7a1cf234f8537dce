"""What a pull and a recompute cost on this machine, learnt from those that happened.

What was learnt is forgotten again: a pair of engines that was slow once is tried again later. Times are seconds on the
caller's monotonic clock.
"""

from __future__ import annotations

import math
from typing import Final

from bidikv_server.cost_line import CostLine

_ENGINES: Final = 64


class CostModel:
    """One prefill engine's own speed, and the cost of a pull from each decode engine, told apart by its index's epoch."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._recompute = CostLine()
        # Least recently pulled from first.
        self._pulls: dict[str, CostLine] = {}

    def computed(self, tokens: int, seconds: float, *, now_s: float) -> None:
        """Prefill computed `tokens` of a prompt in `seconds`, in the company that it had."""
        self._recompute.observe(tokens, seconds, now_s)

    def pulled(self, epoch: str, tokens: int, seconds: float, *, now_s: float) -> None:
        """A pull of `tokens` took `seconds` until its verdict, good or bad.

        The first one from an engine contains the handshake and says nothing about the next.
        """
        line = self._pulls.pop(epoch, None)
        if line is None:
            line = CostLine()
        else:
            line.observe(tokens, seconds, now_s)
        self._pulls[epoch] = line
        if len(self._pulls) > _ENGINES:
            del self._pulls[next(iter(self._pulls))]

    def smallest_gain(self, epoch: str, *, now_s: float) -> float | None:
        """Tokens from which on a pull is faster than computing them; infinite if it never is, None while unknown.

        A prompt computes at least one token whatever is pulled, so only the slope of computing is saved.
        """
        pull = self._pulls.get(epoch)
        if pull is None or not pull.known(now_s) or not self._recompute.known(now_s):
            return None
        fixed, per_token = pull.fixed_and_slope()
        _, saved = self._recompute.fixed_and_slope()
        return fixed / (saved - per_token) if saved > per_token else math.inf
