"""What legs take on each engine, learnt from those that ran: the seconds to the answer's first byte of every way to run a turn.

Four straight lines over tokens (`cost_line`): a prefill engine's legs that asked no decode engine, over what they computed;
what asking and pulling took beyond that, over what was pulled; a decode engine's legs after prefill, and those without. A leg
also waits for what the legs before it have to compute, so a prefill leg's computed tokens are its own and those ahead of
it. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from bidikv_server.cost_line import CostLine

if TYPE_CHECKING:
    from bidikv_server.router.core.ids import EngineUrl

_HALF_LIFE_S: Final = 300.0
"""An agent may take a minute from turn to turn: what a handful of turns told has to last for the next ones. A way that is
taken is measured all the time; it is the others' seconds that grow old, and so each of them is tried again now and then."""
_Line: Final = partial(CostLine, half_life_s=_HALF_LIFE_S)


class LegCosts:
    """Of all engines of one router."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._computing: defaultdict[EngineUrl, CostLine] = defaultdict(_Line)
        self._pulling: defaultdict[EngineUrl, CostLine] = defaultdict(_Line)
        self._handed: defaultdict[EngineUrl, CostLine] = defaultdict(_Line)
        self._alone: defaultdict[EngineUrl, CostLine] = defaultdict(_Line)

    def prefilled(
        self,
        engine: EngineUrl,
        *,
        ahead: int,
        computed: int,
        pulled: int,
        asked: bool,
        seconds: float,
        now_s: float,
    ) -> None:
        """A prefill leg ended well.

        Args:
            engine: Where it ran.
            ahead: Tokens that were to be computed there before its own.
            computed: Tokens that it computed.
            pulled: Tokens that it read back.
            asked: It might have read back, whether or not it did.
            seconds: From sending it to its answer.
            now_s: Now.
        """
        if asked:
            beyond_s = max(0.0, seconds - self._token_s(engine) * (ahead + computed))
            self._pulling[engine].observe(pulled, beyond_s, now_s)
        else:
            self._computing[engine].observe(ahead + computed, seconds, now_s)

    def handed_over(self, engine: EngineUrl, *, tokens: int, seconds: float, now_s: float) -> None:
        """A streamed decode leg after prefill gave its first byte; `tokens` is what it had to fetch."""
        self._handed[engine].observe(tokens, seconds, now_s)

    def ran_alone(self, engine: EngineUrl, *, tokens: int, seconds: float, now_s: float) -> None:
        """A streamed decode leg without prefill gave its first byte; `tokens` is what it had to compute."""
        self._alone[engine].observe(tokens, seconds, now_s)

    def prefill_s(
        self,
        engine: EngineUrl,
        *,
        ahead: int,
        computed: int,
        pulled: int,
        asked: bool,
        now_s: float,
        old: bool = False,
    ) -> float | None:
        """How long a prefill leg would take; None while not known.

        Args:
            engine: Where it would run.
            ahead: Tokens that are to be computed there before its own.
            computed: Tokens that it would compute.
            pulled: Tokens that it would read back.
            asked: It may read back.
            now_s: Now.
            old: What was not seen lately is told, too: as less than it was, so that it is tried again.
        """
        if not asked:
            return _seconds(self._computing[engine], ahead + computed, now_s, old=old)
        beyond_s = _seconds(self._pulling[engine], pulled, now_s, old=old)
        return None if beyond_s is None else beyond_s + self._token_s(engine) * (ahead + computed)

    def hand_over_s(self, engine: EngineUrl, *, tokens: int, now_s: float) -> float | None:
        """How long a decode leg after prefill would take to its first byte; None while not known."""
        return _seconds(self._handed[engine], tokens, now_s, old=True)

    def alone_s(self, engine: EngineUrl, *, tokens: int, now_s: float, like: EngineUrl) -> float | None:
        """How long a decode leg without prefill would take to its first byte.

        While too few ran, as long as one after prefill and computing at the speed of a prefill engine: so some are tried, and
        then it is known.

        Args:
            engine: The decode engine.
            tokens: What it would have to compute.
            now_s: Now.
            like: That prefill engine.
        """
        known_s = _seconds(self._alone[engine], tokens, now_s, old=True)
        if known_s is not None:
            return known_s
        hand_over_s = self.hand_over_s(engine, tokens=tokens, now_s=now_s)
        return None if hand_over_s is None else hand_over_s + self._token_s(like) * tokens

    def forget(self, engine: EngineUrl) -> None:
        """An engine has gone; whatever comes back there has a speed of its own."""
        for lines in (self._computing, self._pulling, self._handed, self._alone):
            lines.pop(engine, None)

    def _token_s(self, engine: EngineUrl) -> float:
        """Seconds to compute a token, as last seen: an engine's speed outlives the belief in how busy it is. 0 if never seen.

        What it is wrong by, `_pulling` makes up for, as long as legs are like those that it was learnt from.
        """
        line = self._computing[engine]
        return line.fixed_and_slope()[1] if line.weight else 0.0


def _seconds(line: CostLine, tokens: int, now_s: float, *, old: bool) -> float | None:
    return line.guess(tokens, now_s) if old else line.predict(tokens, now_s)
