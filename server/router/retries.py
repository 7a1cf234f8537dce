"""How often and how long a turn is tried again: the router's only use of tenacity.

Only an attempt that has shown the client nothing fails with `LegFailed`, so whatever is tried again starts from nothing.
A turn goes to the next engine at once. It waits only when every engine that is left refused it for now.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random,
    wait_random_exponential,
)

from bidikv_server.router.relay import LegFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tenacity import RetryCallState

    from bidikv_server.router.legs import Tried

_BACKOFF: Final = wait_random_exponential(multiplier=0.1, max=2.0)
_SPREAD: Final = wait_random(0.0, 0.1)
"""On top of what an engine asks for, so that those who wait do not come back in one moment."""


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """What one turn may use.

    Attributes:
        attempts: At most so many, the first one included.
        total_s: None begins later than so long after the first one.
        refused_wait_s: How long it may wait in all for engines that refuse.
    """

    attempts: int
    total_s: float
    refused_wait_s: float


class Retries:
    """The attempts at one turn."""

    def __init__(
        self,
        budget: RetryBudget,
        tried: Tried,
        exhausted: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin.

        Args:
            budget: Bounds.
            tried: What the turn has tried, kept by whoever runs its legs.
            exhausted: Whether no engine is left for another attempt.
            clock: Seconds on a clock that never goes back.
        """
        self._clock = clock
        self._began_s = clock()
        self._budget = budget
        self._tried = tried
        self._exhausted = exhausted
        self._waited_s = 0.0

    async def run(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Make attempts until one ends otherwise than with `LegFailed`.

        Raises:
            LegFailed: The last attempt's, when there is no engine or budget for another.
        """
        try:
            await attempt()
        except LegFailed as failed:
            first: list[LegFailed] = [failed]
        else:
            return

        async def again() -> None:
            # The first one has been made, without the cost of all this; it counts nevertheless.
            if first:
                raise first.pop()
            await attempt()

        enough = stop_after_attempt(self._budget.attempts)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(LegFailed),
            wait=self._pause_s,
            stop=lambda state: enough(state) or self._is_late(state) or self._is_hopeless(state),
            before_sleep=self._before_pause,
            reraise=True,
        )
        await retrying(again)

    def _pause_s(self, state: RetryCallState) -> float:
        """Nothing while an engine is left that has not been tried."""
        if not self._exhausted():
            return 0.0
        if self._tried.retry_after_s is not None:
            return self._tried.retry_after_s + _SPREAD(state)
        return _BACKOFF(state)

    def _is_late(self, state: RetryCallState) -> bool:
        """By our own clock: that of tenacity begins after the first attempt, which may have taken most of the time."""
        return self._clock() - self._began_s + state.upcoming_sleep >= self._budget.total_s

    def _is_hopeless(self, state: RetryCallState) -> bool:
        if not self._exhausted():
            return False
        if not self._tried.excluded.refused:
            return True
        return self._waited_s + state.upcoming_sleep > self._budget.refused_wait_s

    def _before_pause(self, state: RetryCallState) -> None:
        if self._exhausted():
            self._waited_s += state.upcoming_sleep
            self._tried.forgive()
