"""Why a turn reused what it reused: the router's account and advice, and what this client saw of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bidikv.drift import Drift
    from bidikv.reuse import TurnReport


@dataclass(frozen=True, slots=True)
class Explanation:
    """One turn, explained. `str()` gives it in sentences.

    Attributes:
        turn: The turn's report.
        reason: The router's code; None if it gave no account.
        advice: The router's sentence on that code; None if it could not be asked, or has forgotten the turn.
        drift: How the history that was sent relates to the turns before it; None if there was nothing to compare.
        placement: Why the turn was decoded where it was, in the router's words; None as for `advice`.
    """

    turn: TurnReport
    reason: str | None
    advice: str | None
    drift: Drift | None
    placement: str | None = None

    def __str__(self) -> str:
        counts = (self.turn.remote_tokens, self.turn.local_tokens, self.turn.computed_tokens)
        remote, local, computed = ("?" if count is None else f"{count:,}" for count in counts)
        told = [
            f"{self.reason or 'no account'}: {remote} tokens from decode, {local} from prefill's cache, {computed} computed."
        ]
        if self.drift is not None and self.drift.breaks_prefix:
            told.append(f"{self.drift}")
        if self.advice:
            told.append(self.advice)
        return "\n".join(told)


def explain_locally(turn: TurnReport) -> Explanation:
    """Explain a turn by what its answer said and what the client saw."""
    return Explanation(turn, turn.reason, None, turn.drift)


def explain_with(turn: TurnReport, told: Any) -> Explanation:
    """Explain a turn with the router's account of its conversation."""
    record = _record_of(turn, told.get("recent") if isinstance(told, Mapping) else None)
    if record is None:
        return explain_locally(turn)
    return Explanation(
        turn, turn.reason, _text(record.get("advice")), turn.drift, _text(record.get("placement"))
    )


def _record_of(turn: TurnReport, recent: Any) -> Mapping[str, Any] | None:
    """The newest of the router's records that says of its turn what the answer's header said."""
    if not isinstance(recent, Sequence):
        return None
    counted = {
        "reason": turn.reason,
        "prompt_tokens": turn.prompt_tokens,
        "remote_tokens": turn.remote_tokens,
        "computed_tokens": turn.computed_tokens,
    }
    records = (record for record in recent if isinstance(record, Mapping))
    return next((r for r in records if all(r.get(name) == value for name, value in counted.items())), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
