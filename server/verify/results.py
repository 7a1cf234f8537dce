"""What a run found, as it is written to JSON, and the sums over it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from bidikv_server.verify.judge import Verdict
from bidikv_server.verify.plan import AnswerOf, Features, Script, Text, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TurnRecord(_Model):
    """One turn as it went."""

    conversation: int
    turn: int
    op: str
    branch: int
    endpoint: str
    stream: bool
    verdict: Verdict
    seconds: float
    """Until the turn was answered, retries included; without its cold run."""
    retries: int = 0
    """How often a clear failure of the turn or its cold run was tried again, under chaos."""
    reason: str | None = None
    prompt_tokens: int | None = None
    remote_tokens: int | None = None
    local_tokens: int | None = None
    computed_tokens: int | None = None
    detail: str | None = None
    warm: str | None = None
    """The answer, if it was not the cold one."""
    cold: str | None = None
    """What it should have been."""


class Outage(_Model):
    """One member of the cluster that was killed."""

    member: str
    before_turn: int
    """Turns that had begun."""
    seconds: float
    """From the kill until the router used it again."""


class Result(_Model):
    """The whole run."""

    bidikv: str
    command: str
    seed: int
    base_url: str
    model: str
    features: dict[str, Any]
    planned_turns: int
    seconds: float
    turns: list[TurnRecord]
    outages: list[Outage]
    kv_cache_usage: dict[str, float | None]
    """Share of KV blocks in use after the last turn, by engine; None if it did not tell."""
    plan: list[dict[str, Any]]

    def count(self, verdict: Verdict) -> int:
        """Turns with this verdict."""
        return sum(turn.verdict is verdict for turn in self.turns)

    @property
    def leaking(self) -> dict[str, float]:
        """Engines that kept blocks."""
        return {url: usage for url, usage in self.kv_cache_usage.items() if usage}

    @property
    def is_good(self) -> bool:
        """Every answer was right, nothing hung and no block was kept."""
        bad = (Verdict.MISMATCH, Verdict.HUNG, Verdict.FAILED)
        return bool(self.turns) and not self.leaking and not any(self.count(verdict) for verdict in bad)


def by_reason(turns: Sequence[TurnRecord]) -> list[tuple[str, int, int, int, int]]:
    """Reason, turns, and prompt tokens from decode, from prefill's own cache and computed; most frequent first."""
    counts = Counter(turn.reason or "unknown" for turn in turns if turn.verdict is not Verdict.HUNG)
    rows = []
    for reason, count in counts.most_common():
        ours = [turn for turn in turns if (turn.reason or "unknown") == reason]
        rows.append(
            (
                reason,
                count,
                sum(turn.remote_tokens or 0 for turn in ours),
                sum(turn.local_tokens or 0 for turn in ours),
                sum(turn.computed_tokens or 0 for turn in ours),
            )
        )
    return rows


def plan_rows(scripts: Sequence[Script]) -> list[dict[str, Any]]:
    """The plan with its texts, so that a finding can be played by other means."""
    return [
        {"conversation": script.number, **asdict(turn), "parts": [_part(part) for part in turn.parts]}
        for script in scripts
        for turn in script.turns
    ]


def feature_row(features: Features) -> dict[str, Any]:
    """The served model's features."""
    return asdict(features)


def history(script: Script, records: Sequence[TurnRecord], until: int) -> list[str]:
    """What a conversation did up to a turn, one line each."""
    done = {record.turn: record for record in records if record.conversation == script.number}
    return [_line(turn, done.get(turn.index)) for turn in script.turns[: until + 1]]


def _line(turn: Turn, record: TurnRecord | None) -> str:
    prompt = " ".join(_short(part) for part in turn.parts)
    went = (
        "not played"
        if record is None
        else f"{record.verdict}, {record.reason}, {record.remote_tokens} from decode"
    )
    return f"turn {turn.index} {turn.op} session {turn.branch} ({turn.endpoint}): {prompt} -> {went}"


def _short(part: object) -> str:
    if isinstance(part, Text):
        words = part.text.split()
        return f"{part.role}[{len(words)} words: {' '.join(words[:4])}…]"
    return f"answer[{part.turn}]" if isinstance(part, AnswerOf) else "tool_result"


def _part(part: Any) -> dict[str, Any]:
    return {"kind": type(part).__name__, **asdict(part)}
