"""Statistics and verdicts over what was measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

IDLE_LIMIT: Final = 0.03
"""Largest share of a core that retention may cost an idle decode engine."""
THROUGHPUT_LIMIT: Final = 0.02
"""Largest loss of decode throughput, and growth of the time per token, with retention full."""
STEADY_SPREAD: Final = 0.1
"""Largest distance between the ratios of neighbouring runs on a machine that is quiet enough."""
LOOKUP_LIMITS_MS: Final = {2048: 10.0, 8192: 40.0}
"""Longest lookup with verification, by blocks of the prompt."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One quantity with retention over the same without.

    Attributes:
        of_medians: Median of all runs with, over median of all runs without.
        low: Smallest ratio of two neighbouring runs.
        high: Largest one.
    """

    of_medians: float
    low: float
    high: float

    @property
    def steady(self) -> bool:
        """Whether neighbouring runs agree well enough for a verdict on their medians."""
        return self.high - self.low <= STEADY_SPREAD

    def __str__(self) -> str:
        return f"{self.of_medians:.3f} ({self.low:.3f} to {self.high:.3f})"


def order(repetitions: int) -> str:
    """Which run comes when: ABBA, so that a drift of the machine's speed falls on both alike."""
    return "ABBA" * repetitions


def ratio(runs: Sequence[tuple[str, float]]) -> Ratio:
    """Compare runs `A` with runs `B`, given in the order in which they were made.

    Raises:
        ValueError: They are not pairs of one A and one B.
    """
    pairs = [dict(runs[first : first + 2]) for first in range(0, len(runs), 2)]
    if not pairs or any(pair.keys() != {"A", "B"} for pair in pairs):
        raise ValueError("runs come in pairs of one A and one B")
    ratios = [pair["A"] / pair["B"] for pair in pairs]
    with_, without = (median(value for kind, value in runs if kind == wanted) for wanted in "AB")
    return Ratio(with_ / without, min(ratios), max(ratios))


def time_per_token(arrivals_s: Sequence[float], tokens: int) -> float:
    """Mean seconds per token after the first; `arrivals_s` are the moments of a stream's events.

    Raises:
        ValueError: There are not two tokens to measure between.
    """
    if tokens < 2 or len(arrivals_s) < 2:
        raise ValueError("one token has no time between tokens")
    return (arrivals_s[-1] - arrivals_s[0]) / (tokens - 1)


def wrong_of(flags: Sequence[bool]) -> str:
    """`2 of 5`."""
    return f"{sum(flags)} of {len(flags)}"


def idle_is_free(before: float, retaining: float) -> bool:
    """Whether an idle engine pays less than `IDLE_LIMIT` more for what it retains."""
    return retaining - before < IDLE_LIMIT


def costs_nothing(throughput: Ratio, per_token: Ratio, preemptions: int) -> bool | None:
    """Whether retention takes no more than `THROUGHPUT_LIMIT` of either, and preempts nothing.

    None where the machine was too noisy to say.
    """
    if preemptions:
        return False
    if not (throughput.steady and per_token.steady):
        return None
    return throughput.of_medians >= 1 - THROUGHPUT_LIMIT and per_token.of_medians <= 1 + THROUGHPUT_LIMIT


def lookup_is_fast(blocks: int, lookup_ms: float, validation_ms: float) -> bool | None:
    """Whether lookup and verification stay under the limit; None where there is none for this size."""
    limit_ms = LOOKUP_LIMITS_MS.get(blocks)
    return None if limit_ms is None else lookup_ms + validation_ms < limit_ms
