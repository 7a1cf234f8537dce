"""Where a turn runs, how it gets its prompt's KV and what it may read back: a pure function of what is known now.

What is possible is worked out here; what is best of that, policies say (`choices`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from bidikv_server.reasons import Reason
from bidikv_server.router.core import decode_policies, mode_policies, prefill_policies
from bidikv_server.router.core.choices import DecodeView, Mode, ModeReason, Placement, PrefillChoice
from bidikv_server.router.core.engines import EngineSnapshot, Role
from bidikv_server.router.core.forecast import lies_on, mode_view, prefill_option, tokens_to_fetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bidikv.headers import TurnHeader
    from bidikv_server.router.core.choices import DecodePolicy, ModePolicy, PrefillPolicy
    from bidikv_server.router.core.conversations import Holder, Match
    from bidikv_server.router.core.forecast import Known
    from bidikv_server.router.core.ids import EngineUrl

__all__ = [
    "Excluded",
    "Keep",
    "NoHealthyEngine",
    "Placement",
    "Policies",
    "Retention",
    "RoutePlan",
    "plan_route",
]


class NoHealthyEngine(Exception):  # noqa: N818
    """No engine of a role that the turn cannot do without takes it."""

    def __init__(self, role: Role) -> None:
        super().__init__(f"no healthy {role} engine")
        self.role = role


@dataclass(frozen=True, slots=True)
class Excluded:
    """Engines that this turn has tried in vain.

    Attributes:
        prefill: Prefill engines that failed it.
        decode: Decode engines that failed it.
        refused: Engines that refused it for now.
    """

    prefill: frozenset[EngineUrl] = field(default=frozenset())
    decode: frozenset[EngineUrl] = field(default=frozenset())
    refused: frozenset[tuple[Role, EngineUrl]] = field(default=frozenset())

    def failed(self, role: Role, url: EngineUrl) -> Excluded:
        """With one more that failed."""
        if role is Role.PREFILL:
            return replace(self, prefill=self.prefill | {url})
        return replace(self, decode=self.decode | {url})

    def refusing(self, role: Role, url: EngineUrl) -> Excluded:
        """With one more that refused."""
        return replace(self, refused=self.refused | {(role, url)})

    def takes(self, engine: EngineSnapshot) -> bool:
        """Whether an engine may still be tried."""
        failed = self.prefill if engine.role is Role.PREFILL else self.decode
        return engine.url not in failed and (engine.role, engine.url) not in self.refused


_NOBODY: Final = Excluded()


@dataclass(frozen=True, slots=True)
class Policies:
    """What chooses among the possible."""

    decode: DecodePolicy = field(default_factory=decode_policies.Sticky)
    prefill: PrefillPolicy = prefill_policies.cached_prefix
    mode: ModePolicy = mode_policies.readback


_DEFAULT: Final = Policies()


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """One attempt at one turn.

    Attributes:
        decode: Engine that answers.
        prefill: Engine that computes the prompt; None means decode does it alone.
        sources: Retention indexes that prefill asks, best first.
        reason: The turn's outcome if it is decided here; None leaves it to prefill's lookup.
        placement: Why it is decoded there.
        prefill_choice: Why the prompt is computed there.
        mode: How the turn gets its prompt's KV.
        mode_reason: Why in that way.
        prefill_tokens: About how many tokens the prefill leg will compute; 0 if that is not known.
        decode_tokens: About how many the decode leg has to fetch, or alone to compute; None if that is not known.
        prompt_tokens: About how long the prompt is; None if that is not known.
        cached_tokens: About how much of it prefill has cached.
    """

    decode: EngineSnapshot
    prefill: EngineSnapshot | None
    sources: tuple[str, ...]
    reason: Reason | None
    placement: Placement
    prefill_choice: PrefillChoice = PrefillChoice.NONE
    mode: Mode = Mode.ALONE
    mode_reason: ModeReason = ModeReason.ONLY_WAY
    prefill_tokens: int = 0
    decode_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0

    @property
    def alone_by_choice(self) -> bool:
        """Decode does it alone because that is faster, and not because there is no other way."""
        return self.prefill is None and self.reason is Reason.DECODE_CHEAPER


@dataclass(frozen=True, slots=True)
class Keep:
    """What decode does with a turn's blocks when it ends.

    Attributes:
        retain_s: Seconds to keep them readable; 0 keeps nothing.
        protect: Hold them, within decode's budget: the client said when it comes back.
        release: Forget what the conversation left: it has ended.
    """

    retain_s: float
    protect: bool = False
    release: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """How long decode keeps turns, in seconds."""

    default_s: float
    max_s: float

    def keep(self, turn: TurnHeader, *, readback: bool) -> Keep:
        """For this turn."""
        if not readback or turn.kind == "aux":
            return Keep(0.0)
        if turn.final:
            return Keep(0.0, release=True)
        if turn.retain_s is None:
            wait_s = turn.wait_s or 0.0
            return Keep(min(max(self.default_s, wait_s), self.max_s), protect=wait_s > 0)
        return Keep(min(turn.retain_s, self.max_s), protect=turn.retain_s > 0)


def plan_route(
    match: Match,
    engines: Sequence[EngineSnapshot],
    *,
    barred: Reason | None = None,
    alone: Reason | None = None,
    together: bool = False,
    prefill_required: bool = False,
    excluded: Excluded | None = None,
    policies: Policies = _DEFAULT,
    known: Known | None = None,
) -> RoutePlan:
    """Choose engines, mode and readback sources for one attempt.

    Args:
        match: The request's place among the known turns.
        engines: All engines.
        barred: Why this request may read nothing back; None lets prefill look.
        alone: Why decode must do without prefill; None hands the prompt to prefill.
        together: Decode may not do without prefill by choice.
        prefill_required: Fail rather than run on decode alone.
        excluded: Engines to leave out.
        policies: What chooses among the possible.
        known: What was learnt so far.

    Raises:
        NoHealthyEngine: Nothing can serve the turn.
    """
    excluded = excluded or _NOBODY
    decode, placement = _choose_decode(match, engines, excluded, policies.decode)
    held = lies_on(decode, match)
    plan = partial(
        RoutePlan,
        decode,
        placement=placement,
        decode_tokens=tokens_to_fetch(known, held=held),
        prompt_tokens=known.prompt.tokens if known is not None and known.prompt is not None else None,
    )
    if alone is not None:
        return plan(None, (), alone)
    options = _available(engines, Role.PREFILL, excluded, at_any_rate=prefill_required)
    if not options and prefill_required:
        raise NoHealthyEngine(Role.PREFILL)
    if not options:
        return plan(None, (), barred or Reason.NO_PREFILL)
    sources, reason = _sources(match, engines, excluded, barred)
    option, choice = policies.prefill(tuple(prefill_option(engine, known, sources) for engine in options))
    mode, why, tokens = Mode.RECOMPUTE, ModeReason.ONLY_WAY, option.computed_tokens
    if sources:
        may_run_alone = not (prefill_required or together)
        mode, why = policies.mode(
            mode_view(option, decode, known, held=held, may_run_alone=held and may_run_alone)
        )
        if mode is Mode.ALONE and may_run_alone:
            return plan(None, (), Reason.DECODE_CHEAPER, mode_reason=why)
        if mode is Mode.RECOMPUTE:
            sources, reason, tokens = (), Reason.RECOMPUTE_CHEAPER, tokens + option.pulled_tokens
        elif mode is Mode.ALONE:
            mode, why = Mode.READBACK, ModeReason.ONLY_WAY
    return plan(
        option.engine,
        sources,
        reason,
        prefill_choice=choice,
        mode=mode,
        mode_reason=why,
        prefill_tokens=tokens,
        cached_tokens=option.cached_tokens,
    )


def _available(
    engines: Sequence[EngineSnapshot], role: Role, excluded: Excluded, *, at_any_rate: bool
) -> list[EngineSnapshot]:
    """Engines of a role that may be tried; those whose circuit is open only if there is no other way."""
    takers = [e for e in engines if e.role is role and e.takes_legs and excluded.takes(e)]
    trusted = [e for e in takers if e.trusted]
    return trusted or (takers if at_any_rate else [])


def _choose_decode(
    match: Match, engines: Sequence[EngineSnapshot], excluded: Excluded, policy: DecodePolicy
) -> tuple[EngineSnapshot, Placement]:
    candidates = _available(engines, Role.DECODE, excluded, at_any_rate=True)
    if not candidates:
        raise NoHealthyEngine(Role.DECODE)
    home = match.home.holder.engine if match.home is not None else None
    view = DecodeView(
        candidates=tuple(candidates),
        home=home,
        absent=_absence(home, engines, excluded)
        if home is not None and all(engine.url != home for engine in candidates)
        else None,
        origin=match.source.holder.engine if match.source else None,
    )
    return policy(view)


def _absence(home: EngineUrl, engines: Sequence[EngineSnapshot], excluded: Excluded) -> Placement:
    """Why a home may not be chosen."""
    engine = next((e for e in engines if e.role is Role.DECODE and e.url == home), None)
    if engine is None or not engine.healthy:
        return Placement.ENGINE_LOST
    if engine.draining:
        return Placement.DRAINING
    if (Role.DECODE, home) in excluded.refused:
        return Placement.REFUSED
    return Placement.ENGINE_LOST if home in excluded.decode else Placement.CIRCUIT_OPEN


def _sources(
    match: Match, engines: Sequence[EngineSnapshot], excluded: Excluded, barred: Reason | None
) -> tuple[tuple[str, ...], Reason | None]:
    """Indexes to ask. An engine that has failed this turn is not waited for once more."""
    if barred is not None:
        return (), barred
    if match.source is None:
        return (), Reason.NEW_CONVERSATION
    if match.source.holder.engine in excluded.decode:
        return (), Reason.DECODE_CHANGED
    return _indexes_of(match.source.holder, engines)


def _indexes_of(holder: Holder, engines: Sequence[EngineSnapshot]) -> tuple[tuple[str, ...], Reason | None]:
    for engine in engines:
        if engine.role is Role.DECODE and engine.url == holder.engine:
            if not engine.healthy or (holder.indexes and engine.indexes != holder.indexes):
                return (), Reason.DECODE_CHANGED
            if not engine.indexes:
                return (), Reason.NO_INDEX
            return tuple(index.address for index in engine.indexes), None
    return (), Reason.DECODE_CHANGED
