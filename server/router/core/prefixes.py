"""Which prefill engine computed which beginning of a prompt, and how many tokens that is: bounded, and never proof of anything.

A prompt's beginnings are named by the digests of its chain, which hold tenant, model and salt. What is remembered here
only steers: to be wrong costs time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.prompts import is_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_server.router.core.digests import Chain, Digest
    from bidikv_server.router.core.ids import EngineUrl

_ENGINES: Final = 4
"""Engines remembered for one prefix; the one used last comes last."""
_LEAST_KEPT: Final = 0.01
"""Share of what it computed that an engine is taken to keep at least, so that more can be learnt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is foreseen of a request's prompt, in tokens.

    Attributes:
        tokens: All of it.
        new_tokens: What follows the answer to the deepest known turn; all of it if it extends none.
        cached: By prefill engine, how much of it that has computed before.
        idle_s: How long ago that turn ended; None if it extends none, or if that is not known.
    """

    tokens: int
    new_tokens: int
    cached: Mapping[EngineUrl, int] = field(default_factory=dict)
    idle_s: float | None = None


@dataclass(slots=True)
class _Prefix:
    tokens: int
    at_s: float
    engines: dict[EngineUrl, float]
    counted: bool = False


class PrefixMemory:
    """Least recently used first out. Times are seconds on one monotonic clock of the caller."""

    def __init__(self, *, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[Digest, _Prefix] = OrderedDict()
        self._since: dict[EngineUrl, float] = {}
        self._tokens_per_size: float | None = None
        self._grown: float | None = None
        self._kept: dict[EngineUrl, float] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def foresee(self, chain: Chain, now_s: float, *, turn_steps: int = 0) -> Prompt | None:
        """What a request's prompt will take; None while nothing is known to measure it by.

        Args:
            chain: Of the prompt.
            now_s: Now.
            turn_steps: Steps of the deepest known turn that it extends; 0 if it extends none.
        """
        if not chain.sizes:
            return None
        cached: dict[EngineUrl, int] = {}
        known: tuple[int, _Prefix] | None = None
        for depth in range(len(chain.prefixes), 0, -1):
            prefix = self._prefixes.get(chain.prefixes[depth - 1])
            if prefix is None:
                continue
            known = known or (depth, prefix)
            for engine, at_s in prefix.engines.items():
                if at_s >= self._since.get(engine, at_s):
                    cached[engine] = round(prefix.tokens * self._kept.get(engine, 1.0))
            if cached:
                # Engines that computed a shorter beginning only are as good as those that computed none.
                break
        if known is None:
            rate = self._tokens_per_size
            return None if rate is None else Prompt(*(2 * (round(rate * chain.sizes[-1]),)))
        depth, prefix = known
        size = chain.sizes[depth - 1]
        rate = self._rate(prefix.tokens, size)
        turn = self._prefixes.get(chain.prefixes[turn_steps - 1]) if turn_steps else None
        tokens = prefix.tokens + round(rate * (chain.sizes[-1] - size))
        return Prompt(
            tokens,
            min(tokens, round(rate * _new_size(chain, turn_steps))) if turn_steps else tokens,
            cached,
            now_s - turn.at_s if turn is not None else None,
        )

    def note(
        self,
        chain: Chain,
        engine: EngineUrl | None,
        prompt_tokens: int,
        now_s: float,
        *,
        counted: bool = True,
    ) -> None:
        """Remember that a prompt was computed.

        Args:
            chain: Of the prompt.
            engine: The prefill engine that did it; None stands for decode alone.
            prompt_tokens: Its length.
            now_s: Now.
            counted: An engine said so; False is what was foreseen.
        """
        if not chain.sizes or not chain.sizes[-1]:
            return
        size = chain.sizes[-1]
        if counted:
            self._learn(chain, prompt_tokens)
        rate = self._rate(prompt_tokens, size)
        for depth in range(len(chain.prefixes), 0, -1):
            tokens = max(0, prompt_tokens - round(rate * (size - chain.sizes[depth - 1])))
            was_known = self._touch(chain.prefixes[depth - 1], engine, tokens, now_s)
            if was_known:
                break
        if counted:
            prompt = self._prefixes[chain.prefixes[-1]]
            prompt.tokens, prompt.counted = prompt_tokens, True
        while len(self._prefixes) > self._max_prefixes:
            self._prefixes.popitem(last=False)

    def _learn(self, chain: Chain, prompt_tokens: int) -> None:
        """How many tokens a size has: of whole prompts, and of what conversations grow by, which no tools stand before."""
        size = chain.sizes[-1]
        self._tokens_per_size = _moved(self._tokens_per_size, prompt_tokens / size)
        for depth in range(len(chain.prefixes) - 1, 0, -1):
            prefix = self._prefixes.get(chain.prefixes[depth - 1])
            if prefix is not None and prefix.counted:
                grown = size - chain.sizes[depth - 1]
                if grown > 0 and prompt_tokens > prefix.tokens:
                    self._grown = _moved(self._grown, (prompt_tokens - prefix.tokens) / grown)
                return

    def _rate(self, tokens: int, size: int) -> float:
        """Tokens of a size that follows a prompt of so many tokens and that size."""
        if self._grown is not None:
            return self._grown
        return tokens / size if size else (self._tokens_per_size or 0.0)

    def ended(self, chain: Chain, now_s: float) -> None:
        """The turn of a prompt ended: from now on it is idle."""
        prefix = self._prefixes.get(chain.prefixes[-1]) if chain.prefixes else None
        if prefix is not None:
            prefix.at_s = now_s

    def found(self, engine: EngineUrl, foreseen_tokens: int, local_tokens: int) -> None:
        """Compare what an engine found in its cache with what was foreseen: it may keep less, or have no cache at all."""
        kept = self._kept.get(engine, 1.0)
        whole = foreseen_tokens / kept if kept else 0.0
        if whole > 0:
            self._kept[engine] = max(_LEAST_KEPT, kept + (min(1.0, local_tokens / whole) - kept) / 4)

    def forget(self, engine: EngineUrl, now_s: float) -> None:
        """A prefill engine has gone, and its cache with it."""
        self._since[engine] = now_s
        self._kept.pop(engine, None)

    def _touch(self, digest: Digest, engine: EngineUrl | None, tokens: int, now_s: float) -> bool:
        """Note one prefix; whether the engine was known to have it, and with it everything before."""
        prefix = self._prefixes.get(digest)
        if prefix is None:
            prefix = self._prefixes[digest] = _Prefix(tokens, now_s, {})
        self._prefixes.move_to_end(digest)
        prefix.at_s = now_s
        if not prefix.counted:
            prefix.tokens = tokens
        if engine is None:
            return True
        at_s = prefix.engines.pop(engine, None)
        prefix.engines[engine] = now_s
        if len(prefix.engines) > _ENGINES:
            del prefix.engines[next(iter(prefix.engines))]
        return at_s is not None and at_s >= self._since.get(engine, at_s)


def _moved(known: float | None, seen: float) -> float:
    return seen if known is None else known + (seen - known) / 8


def _new_size(chain: Chain, turn_steps: int) -> int:
    """Size of what follows a turn and its answer, which decode holds as well.

    A chunk of a completion's prompt does not say whose it is: there the answer counts as new.
    """
    end = min(turn_steps, len(chain.sizes))
    while 0 < end < len(chain.steps) and is_answer(chain.steps[end]):
        end += 1
    return chain.sizes[-1] - (chain.sizes[end - 1] if end else 0)
