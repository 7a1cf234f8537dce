"""Two runs of one agent side by side, with readback and without: in step, as a table, as a picture."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from bidikv.examples.turns import TurnRecord

_HEAD: Final = ("turn", "prompt", "from decode", "local", "computed", "TTFT on", "TTFT off", "ratio", "reuse")


def lockstep(
    on: Iterator[Sequence[TurnRecord]],
    off: Iterator[Sequence[TurnRecord]],
    on_step: Callable[[int], None] = lambda _: None,
) -> tuple[list[TurnRecord], list[TurnRecord]]:
    """Play two runs step by step in turns, the leader changing with every step: what slows the machine down meets both.

    Args:
        on: The run with readback.
        off: The run without.
        on_step: Told of each step before it is played.
    """
    runs = (on, off)
    records: tuple[list[TurnRecord], list[TurnRecord]] = ([], [])
    order = [0, 1]
    number = 0
    while order:
        on_step(number)
        for which in tuple(order):
            step = next(runs[which], None)
            if step is None:
                order.remove(which)
            else:
                records[which].extend(step)
        order.reverse()
        number += 1
    return records


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn, played twice.

    Attributes:
        turn: Its number within its agent's conversation; 0 has nothing to reuse from decode.
        on: With readback.
        off: Without.
    """

    turn: int
    on: TurnRecord
    off: TurnRecord

    @property
    def identical(self) -> bool:
        """Whether both answers are the same."""
        return _said(self.on) == _said(self.off)

    @property
    def ratio(self) -> float | None:
        """How many times sooner the first token came with readback; None where a time is not known."""
        return self.off.ttft_s / self.on.ttft_s if self.on.ttft_s and self.off.ttft_s else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All turns of an agent, played twice.

    Attributes:
        pairs: In the order in which they were played.
        unpaired: Turns that only one of the runs has.
    """

    pairs: tuple[Pair, ...]
    unpaired: int = 0

    @classmethod
    def of(cls, on: Sequence[TurnRecord], off: Sequence[TurnRecord]) -> Self:
        """Pair the turns of each agent by their order."""
        waiting: defaultdict[str, list[TurnRecord]] = defaultdict(list)
        for record in off:
            waiting[record.agent].append(record)
        counted: defaultdict[str, int] = defaultdict(int)
        pairs = []
        for record in on:
            turn = counted[record.agent]
            counted[record.agent] += 1
            if turn < len(waiting[record.agent]):
                pairs.append(Pair(turn, record, waiting[record.agent][turn]))
        return cls(tuple(pairs), len(on) + len(off) - 2 * len(pairs))

    @property
    def warm(self) -> tuple[Pair, ...]:
        """All but each agent's first turn."""
        return tuple(pair for pair in self.pairs if pair.turn > 0)

    @property
    def answers_identical(self) -> bool:
        """Whether both runs said the same in every turn."""
        return not self.unpaired and all(pair.identical for pair in self.pairs)


def table(comparison: Comparison) -> str:
    """Turns as rows, then their medians, for a terminal. Counts are prompt tokens of the run with readback."""
    agents = any(pair.on.agent for pair in comparison.pairs)
    head = ("agent", *_HEAD) if agents else _HEAD
    rows = [head, *(_row(pair, agents=agents) for pair in comparison.pairs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    left = {0, len(head) - 1} if agents else {len(head) - 1}
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([*lines, "", *_summary(comparison)])


def _row(pair: Pair, *, agents: bool) -> tuple[str, ...]:
    on = pair.on
    row = (
        str(pair.turn),
        *(_count(n) for n in (on.prompt_tokens, on.remote_tokens, on.local_tokens, on.computed_tokens)),
        _seconds(on.ttft_s),
        _seconds(pair.off.ttft_s),
        "?" if pair.ratio is None else f"{pair.ratio:.1f}x",
        (on.reason or "no account") + ("" if pair.identical else " (OTHER ANSWER)"),
    )
    return (on.agent, *row) if agents else row


def _summary(comparison: Comparison) -> Iterable[str]:
    warm = [pair for pair in comparison.warm if pair.ratio is not None]
    if warm:
        ratios = [pair.ratio for pair in warm if pair.ratio is not None]
        on = median(pair.on.ttft_s for pair in warm if pair.on.ttft_s)
        off = median(pair.off.ttft_s for pair in warm if pair.off.ttft_s)
        yield (
            f"warm turns wait {on:.2f} s with readback, {off:.2f} s without: {median(ratios):.1f} times less "
            f"(smallest {min(ratios):.1f}); sooner in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        )
    if comparison.unpaired:
        yield f"{comparison.unpaired} turns were taken in one of the runs only"
    same = "identical" if comparison.answers_identical else "NOT IDENTICAL"
    yield f"answers with and without readback: {same}"


def write_plot(path: Path, comparison: Comparison) -> None:
    """Draw TTFT against prompt tokens over the warm turns, with readback and without (PNG).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import

    figure = Figure(figsize=(5.5, 4.2), layout="constrained")
    panel = figure.subplots()
    points = sorted(
        (pair.on.prompt_tokens, pair.on.ttft_s, pair.off.ttft_s)
        for pair in comparison.warm
        if pair.on.prompt_tokens is not None and pair.on.ttft_s is not None and pair.off.ttft_s is not None
    )
    prompts = [prompt for prompt, _, _ in points]
    panel.plot(prompts, [off for _, _, off in points], "s-", color="#b5482a", label="off")
    panel.plot(prompts, [on for _, on, _ in points], "o-", color="#1f6f8b", label="on")
    panel.set_xlabel("prompt tokens")
    panel.set_ylabel("time to first token, warm turns (s)")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(title="readback")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _said(record: TurnRecord) -> tuple[str | None, ...]:
    return record.text, record.tool_name, record.tool_args


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)


def _seconds(time_s: float | None) -> str:
    return "?" if time_s is None else f"{time_s:.2f} s"
