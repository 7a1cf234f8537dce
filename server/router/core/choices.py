"""What placement chooses, under which names, and from what: the vocabulary between the plan and its policies.

A policy is a function (or an object that can be called) of one view, without memory, clock or I/O. It returns one of the
options that the view offers, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from bidikv_server.router.core.engines import EngineSnapshot

if TYPE_CHECKING:
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
    PRESSURE = "pressure"
    """Its conversation's engine is much busier than this one: it is read back from there and lives here from now on."""
    REFUSED = "refused"
    """Its conversation's engine refused this turn for now (status 429 or 503)."""
    CIRCUIT_OPEN = "circuit_open"
    """Too many legs failed on its conversation's engine lately."""


class PrefillChoice(StrEnum):
    """Why a prompt is computed where it is."""

    NONE = "none"
    """Decode does it alone."""
    ONLY = "only"
    """No other engine could take it."""
    CACHED_PREFIX = "cached_prefix"
    """It has computed the longest beginning of this prompt."""
    LEAST_LOADED = "least_loaded"
    """It has least to do, what it would have to compute of this prompt included."""


class Mode(StrEnum):
    """How a turn gets its prompt's KV."""

    READBACK = "readback"
    """Prefill pulls what decode holds as far as that pays, computes the rest, and hands it to decode."""
    RECOMPUTE = "recompute"
    """Prefill asks no decode engine."""
    ALONE = "alone"
    """Decode does without prefill."""


class ModeReason(StrEnum):
    """Why a turn gets its prompt's KV in that way."""

    FIXED = "fixed"
    """The policy weighs nothing."""
    ONLY_WAY = "only_way"
    """There is nothing to read back, no prefill engine, or the request can be served in no other way."""
    CHEAPER = "cheaper"
    """By what was measured lately it takes least time to the first token."""
    UNKNOWN_COSTS = "unknown_costs"
    """Too little was measured lately."""


@dataclass(frozen=True, slots=True)
class DecodeView:
    """Where a turn may be decoded.

    Attributes:
        candidates: Engines that may be chosen; never empty.
        home: Where its conversation lives, also if that may not be chosen; None if nowhere.
        absent: Why the home may not be chosen; None if it may, or if there is none.
        origin: Where what it branched off from lies.
    """

    candidates: tuple[EngineSnapshot, ...]
    home: EngineUrl | None = None
    absent: Placement | None = None
    origin: EngineUrl | None = None


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """A prefill engine that may be chosen.

    Attributes:
        engine: The engine.
        cached_tokens: How much of the prompt it has computed before.
        computed_tokens: How much it would have to compute.
        pulled_tokens: How much it could read back.
        expected_s: How long its leg would take; None while too little was measured.
    """

    engine: EngineSnapshot
    cached_tokens: int = 0
    computed_tokens: int = 0
    pulled_tokens: int = 0
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModeView:
    """The ways a turn can get its prompt's KV. Seconds are to the answer's first byte, None while not known.

    Attributes:
        readback_s: If prefill pulls what decode holds.
        recompute_s: If prefill computes all that it has not cached.
        alone_s: If decode computes what it has not cached; None also where it may not.
        new_tokens: Tokens that decode does not hold; None if not known.
        waiting: Requests that decode could not run when it was last asked.
    """

    readback_s: float | None = None
    recompute_s: float | None = None
    alone_s: float | None = None
    new_tokens: int | None = None
    waiting: int = 0


DecodePolicy: TypeAlias = Callable[[DecodeView], tuple[EngineSnapshot, Placement]]
PrefillPolicy: TypeAlias = Callable[[tuple[PrefillOption, ...]], tuple[PrefillOption, PrefillChoice]]
ModePolicy: TypeAlias = Callable[[ModeView], tuple[Mode, ModeReason]]
