"""What a turn would take on an engine, and in which way: the views that policies choose from, made of what was learnt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.choices import ModeView, PrefillOption

if TYPE_CHECKING:
    from bidikv_server.router.core.conversations import Match
    from bidikv_server.router.core.engines import EngineSnapshot
    from bidikv_server.router.core.leg_costs import LegCosts
    from bidikv_server.router.core.prefixes import Prompt

_STALE_S: Final = 120.0
"""How long ago a turn may have ended for decode's own prefix cache to be counted on."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was learnt about a turn's prompt and about costs.

    Attributes:
        costs: What legs take.
        now_s: Now, on their clock.
        prompt: What is foreseen of the prompt; None if nothing.
    """

    costs: LegCosts
    now_s: float
    prompt: Prompt | None = None


def lies_on(decode: EngineSnapshot, match: Match) -> bool:
    """Whether an engine's own prefix cache holds a turn that this request extends, as far as the router can know.

    Of several data-parallel ranks each has a cache of its own, and the engine chooses among them by load.
    """
    turn = match.ancestor
    return (
        turn is not None
        and decode.prefix_caching is not False
        and len(decode.indexes) == 1
        and turn.holder.engine == decode.url
        and turn.holder.indexes == decode.indexes
    )


def tokens_to_fetch(known: Known | None, *, held: bool) -> int | None:
    """Tokens that decode lacks."""
    if known is None or known.prompt is None:
        return None
    return known.prompt.new_tokens if held else known.prompt.tokens


def prefill_option(engine: EngineSnapshot, known: Known | None, sources: tuple[str, ...]) -> PrefillOption:
    """What a prefill engine would have to do, if it may read back from these."""
    if known is None or known.prompt is None:
        return PrefillOption(engine)
    prompt = known.prompt
    cached = prompt.cached.get(engine.url, 0)
    missing = max(0, prompt.tokens - cached)
    computed = min(missing, prompt.new_tokens) if sources else missing
    pulled = missing - computed
    expected_s = known.costs.prefill_s(
        engine.url,
        ahead=engine.backlog_tokens,
        computed=computed,
        pulled=pulled,
        asked=bool(sources),
        now_s=known.now_s,
    )
    return PrefillOption(engine, cached, computed, pulled, expected_s)


def mode_view(
    option: PrefillOption, decode: EngineSnapshot, known: Known | None, *, held: bool, may_run_alone: bool
) -> ModeView:
    """What each way would take. The hand-over to decode is the same after either kind of prefill leg."""
    if known is None or known.prompt is None:
        return ModeView(waiting=decode.waiting)
    prompt = known.prompt
    costs, now_s = known.costs, known.now_s
    new = prompt.new_tokens
    fetched = new if held else prompt.tokens
    hand_over_s = costs.hand_over_s(decode.url, tokens=fetched, now_s=now_s)
    prefill_s = partial(
        costs.prefill_s, option.engine.url, ahead=option.engine.backlog_tokens, now_s=now_s, old=True
    )
    readback_s = prefill_s(computed=option.computed_tokens, pulled=option.pulled_tokens, asked=True)
    recompute_s = prefill_s(computed=option.computed_tokens + option.pulled_tokens, pulled=0, asked=False)
    fresh = prompt.idle_s is not None and prompt.idle_s <= _STALE_S
    return ModeView(
        readback_s=_sum(readback_s, hand_over_s),
        recompute_s=_sum(recompute_s, hand_over_s),
        alone_s=costs.alone_s(decode.url, tokens=new, now_s=now_s, like=option.engine.url)
        if may_run_alone and fresh
        else None,
        new_tokens=new,
        waiting=decode.waiting,
    )


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
