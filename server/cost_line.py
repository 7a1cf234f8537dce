"""Seconds as a straight line over tokens, learnt from what happened: by least squares in which older observations fade.

Shared by prefill's connector and the router. Nothing is assumed before enough was seen, and what was learnt is forgotten
again. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

HALF_LIFE_S: Final = 120.0
ENOUGH: Final = 4.0
"""Observations, faded ones counting for less, from which on a line is believed."""
MOST: Final = 16.0
"""Observations that count at most, so that a line that went wrong is forgotten within two half-lives."""
_OUTLIER: Final = 4.0
_LEAST_S: Final = 1e-3
_FORGOTTEN: Final = 1 / 16
"""Share of `ENOUGH` that is nothing."""
_SPREAD: Final = 0.1
"""Standard deviation of the tokens over their mean below which a slope cannot be told from noise."""


@dataclass(slots=True)
class CostLine:
    """Seconds = fixed + slope * tokens, in which an observation counts half after `half_life_s`."""

    half_life_s: float = HALF_LIFE_S
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0
    at_s: float = 0.0
    settled: bool = False

    def observe(self, tokens: int, seconds: float, now_s: float) -> None:
        """It took `seconds` for `tokens`. One that took far longer than the line says counts as rather longer."""
        if self.known(now_s):
            fixed, slope = self.fixed_and_slope()
            seconds = min(seconds, _OUTLIER * max(fixed + slope * tokens, _LEAST_S))
        # Neither does much that is old outweigh what is new.
        fade = self._fade(now_s) * min(1.0, MOST / self.weight if self.weight else 1.0)
        self.at_s = max(self.at_s, now_s)
        self.weight = self.weight * fade + 1
        self.settled = self.settled or self.weight >= ENOUGH
        self.tokens = self.tokens * fade + tokens
        self.seconds = self.seconds * fade + seconds
        self.tokens_squared = self.tokens_squared * fade + tokens * tokens
        self.product = self.product * fade + tokens * seconds

    def known(self, now_s: float) -> bool:
        """Whether enough was seen, lately."""
        return self.weight * self._fade(now_s) >= ENOUGH

    def fixed_and_slope(self) -> tuple[float, float]:
        """Seconds of nothing, and seconds per token; neither below zero. Call it only once `known`.

        With tokens too alike to tell the two apart everything counts as slope; without any, as fixed.
        """
        mean_tokens, mean_seconds = self.tokens / self.weight, self.seconds / self.weight
        if mean_tokens <= 0:
            return mean_seconds, 0.0
        variance = self.tokens_squared / self.weight - mean_tokens**2
        if variance <= (_SPREAD * mean_tokens) ** 2:
            return 0.0, mean_seconds / max(1.0, mean_tokens)
        covariance = self.product / self.weight - mean_tokens * mean_seconds
        slope = max(0.0, covariance / variance)
        if slope * mean_tokens > mean_seconds:
            return 0.0, mean_seconds / mean_tokens
        return mean_seconds - slope * mean_tokens, slope

    def predict(self, tokens: float, now_s: float) -> float | None:
        """Seconds for so many tokens; None while too little was seen."""
        if not self.known(now_s):
            return None
        fixed, slope = self.fixed_and_slope()
        return fixed + slope * tokens

    def guess(self, tokens: float, now_s: float) -> float | None:
        """Seconds for so many tokens, the fewer the older the line: so it is tried again, the sooner the better it was.

        None before enough was seen for the first time, and again when next to nothing is left of it.
        """
        belief = self.weight * self._fade(now_s) / ENOUGH
        if not self.settled or belief < _FORGOTTEN:
            return None
        fixed, slope = self.fixed_and_slope()
        return (fixed + slope * tokens) * min(1.0, belief)

    def _fade(self, now_s: float) -> float:
        return math.exp2(-max(0.0, now_s - self.at_s) / self.half_life_s)
