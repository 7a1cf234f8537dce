"""What a conversation reused, as a whole and turn by turn: plain sums over its turns' reports (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bidikv.drift import Drift
    from bidikv.reuse import TurnReport


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What was reused of the prompts of these turns. Counts are prompt tokens; turns without an account count nothing.

    Attributes:
        turns: In order of their answers.
    """

    turns: tuple[TurnReport, ...]

    @property
    def prompt_tokens(self) -> int:
        """All prompts together."""
        return _sum(turn.prompt_tokens for turn in self.turns)

    @property
    def remote_tokens(self) -> int:
        """Pulled from decode."""
        return _sum(turn.remote_tokens for turn in self.turns)

    @property
    def local_tokens(self) -> int:
        """Found in prefill's own prefix cache."""
        return _sum(turn.local_tokens for turn in self.turns)

    @property
    def reused_tokens(self) -> int:
        """Not computed: remote and local."""
        return self.remote_tokens + self.local_tokens

    @property
    def computed_tokens(self) -> int:
        """Computed by prefill."""
        return _sum(turn.computed_tokens for turn in self.turns)

    @property
    def ttft_s(self) -> tuple[float | None, ...]:
        """Seconds to the first output of each turn; None for turns that do not stream."""
        return tuple(turn.ttft_s for turn in self.turns)

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """The changes of history that cost reuse, in order."""
        return tuple(turn.drift for turn in self.turns if turn.drift is not None and turn.drift.breaks_prefix)

    def __str__(self) -> str:
        """A table: one line for each turn, and their sum."""
        rows: list[tuple[str, ...]] = [
            ("turn", "reason", "prompt", "remote", "local", "computed", "TTFT", "history")
        ]
        rows += [
            (str(number), turn.reason or "-", *map(_cell, _counts(turn)), _time(turn.ttft_s), _history(turn))
            for number, turn in enumerate(self.turns)
        ]
        total = (self.prompt_tokens, self.remote_tokens, self.local_tokens, self.computed_tokens)
        rows.append(("all", "", *map(_cell, total), "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column in {1, 7} else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def _sum(counts: Iterable[int | None]) -> int:
    return sum(count or 0 for count in counts)


def _counts(turn: TurnReport) -> tuple[int | None, ...]:
    return turn.prompt_tokens, turn.remote_tokens, turn.local_tokens, turn.computed_tokens


def _cell(count: int | None) -> str:
    return "-" if count is None else str(count)


def _time(ttft_s: float | None) -> str:
    return "-" if ttft_s is None else f"{ttft_s * 1000:.0f} ms"


def _history(turn: TurnReport) -> str:
    return "-" if turn.drift is None else turn.drift.summary
