"""Where a turn runs and what it may read back: a pure function of the request's place and the engines' snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from bidikv_server.reasons import Reason
from bidikv_server.router.core.engines import EngineSnapshot, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bidikv.headers import TurnHeader
    from bidikv_server.router.core.conversations import Holder, Match
    from bidikv_server.router.core.ids import EngineUrl


class Placement(StrEnum):
    """Why a turn is decoded where it is."""

    HOME = "home"
    """Its conversation lives there."""
    LEAST_LOADED = "least_loaded"
    """Its conversation lives nowhere yet."""
    DRAINING = "draining"
    """Its conversation's engine is being emptied: it is read back from there and lives elsewhere from now on."""
    KEPT_RESPONSE = "kept_response"
    """It goes on from an earlier response, and that engine keeps it."""
    ENGINE_LOST = "engine_lost"
    """Its conversation's engine is down, or failed this turn."""


class NoHealthyEngine(Exception):  # noqa: N818
    """No engine of a role that the turn cannot do without takes it."""

    def __init__(self, role: Role) -> None:
        super().__init__(f"no healthy {role} engine")
        self.role = role


@dataclass(frozen=True, slots=True)
class Excluded:
    """Engines that already failed this turn."""

    prefill: frozenset[EngineUrl] = field(default=frozenset())
    decode: frozenset[EngineUrl] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """One attempt at one turn.

    Attributes:
        decode: Engine that answers.
        prefill: Engine that computes the prompt; None means decode does it alone.
        sources: Retention indexes that prefill asks, best first.
        reason: The turn's outcome if it is decided here; None leaves it to prefill's lookup.
        placement: Why it is decoded there.
    """

    decode: EngineSnapshot
    prefill: EngineSnapshot | None
    sources: tuple[str, ...]
    reason: Reason | None
    placement: Placement


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
    prefill_required: bool = False,
    excluded: Excluded | None = None,
) -> RoutePlan:
    """Choose engines and readback sources for one attempt.

    Args:
        match: The request's place among the known turns.
        engines: All engines.
        barred: Why this request may read nothing back; None lets prefill look.
        alone: Why decode must do without prefill; None hands the prompt to prefill.
        prefill_required: Fail rather than run on decode alone when no prefill engine is up.
        excluded: Engines to leave out.

    Raises:
        NoHealthyEngine: Nothing can serve the turn.
    """
    excluded = excluded or Excluded()
    decode, placement = _choose_decode(match, engines, excluded)
    if alone is not None:
        return RoutePlan(decode, None, (), alone, placement)
    prefill = _available(engines, Role.PREFILL, excluded.prefill)
    if not prefill and prefill_required:
        raise NoHealthyEngine(Role.PREFILL)
    if not prefill:
        return RoutePlan(decode, None, (), barred or Reason.NO_PREFILL, placement)
    sources, reason = _sources(match, engines, barred)
    return RoutePlan(decode, _least_loaded(prefill), sources, reason, placement)


def _available(
    engines: Sequence[EngineSnapshot], role: Role, excluded: frozenset[EngineUrl]
) -> list[EngineSnapshot]:
    return [e for e in engines if e.role is role and e.takes_legs and e.url not in excluded]


def _choose_decode(
    match: Match, engines: Sequence[EngineSnapshot], excluded: Excluded
) -> tuple[EngineSnapshot, Placement]:
    """The conversation's own engine, else the least loaded one.

    A fork only prefers its origin's engine among equals: it can read back from there anyway, and a popular origin
    would otherwise gather every fork on one engine.
    """
    candidates = _available(engines, Role.DECODE, excluded.decode)
    if not candidates:
        raise NoHealthyEngine(Role.DECODE)
    home = match.home.holder.engine if match.home is not None else None
    for engine in candidates:
        if engine.url == home:
            return engine, Placement.HOME
    chosen = _least_loaded(candidates, prefer=match.source.holder.engine if match.source else None)
    if home is None:
        return chosen, Placement.LEAST_LOADED
    draining = any(e.role is Role.DECODE and e.url == home and e.healthy and e.draining for e in engines)
    return chosen, Placement.DRAINING if draining else Placement.ENGINE_LOST


def _least_loaded(engines: Sequence[EngineSnapshot], prefer: EngineUrl | None = None) -> EngineSnapshot:
    """Fewest legs in flight; ties go to the preferred one, then to the first configured."""
    return min(engines, key=lambda engine: (engine.in_flight, engine.url != prefer))


def _sources(
    match: Match, engines: Sequence[EngineSnapshot], barred: Reason | None
) -> tuple[tuple[str, ...], Reason | None]:
    if barred is not None:
        return (), barred
    if match.source is None:
        return (), Reason.NEW_CONVERSATION
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
