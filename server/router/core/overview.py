"""What the admin API shows of the whole router: plain values of its engines and of the turns that ended last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv_server.reasons import Reason
from bidikv_server.router.core.advice import advise
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.reports import OK, fields

if TYPE_CHECKING:
    from bidikv_server.router.core.engine_notes import EngineNotes
    from bidikv_server.router.core.engines import EngineSnapshot
    from bidikv_server.router.core.recent import Ended


def shown_engine(seen: EngineSnapshot, notes: EngineNotes | None) -> dict[str, Any]:
    """One engine.

    Args:
        seen: What the router knows of it.
        notes: What it told of itself last; None if it told nothing.
    """
    shown: dict[str, Any] = {
        "role": seen.role,
        "url": seen.url,
        "healthy": seen.healthy,
        "draining": seen.draining,
        "circuit": seen.circuit,
        "in_flight": seen.in_flight,
    }
    if seen.role is Role.DECODE:
        shown["index"] = [index.address for index in seen.indexes]
    if notes is not None and seen.healthy:
        shown["running"] = notes.running
        shown["waiting"] = notes.waiting
        shown["kv_usage"] = notes.kv_usage
        shown["retained_tokens"] = notes.retained_tokens
        shown["protected_tokens"] = notes.protected_tokens
    return shown


def ended_turn(turn: Ended, now_s: float, wall_s: float) -> dict[str, Any]:
    """One turn that has ended, as its log line has it, with its number and what to change.

    Args:
        turn: The turn.
        now_s: Now, on the clock of its end.
        wall_s: The same moment in seconds since 1970.
    """
    report = turn.report
    advice = None
    if report.outcome == OK and report.reuse is not None:
        advice = advise(Reason(report.reuse.reason), report.reuse.diverged_at_token)
    return {
        "number": turn.number,
        "time_s": round(wall_s - (now_s - turn.at_s), 3),
        **fields(report),
        "advice": advice,
    }
