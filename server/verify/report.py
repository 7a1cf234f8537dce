"""Shows a run: a line per turn, tables at the end, the history of a mismatch, and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from bidikv_server.verify.judge import Verdict
from bidikv_server.verify.results import by_reason, history

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from bidikv_server.verify.options import VerifyOptions
    from bidikv_server.verify.plan import Script
    from bidikv_server.verify.results import Result, TurnRecord


def turn_line(number: int, planned: int, record: TurnRecord) -> str:
    """One turn, as progress."""
    counts = (record.prompt_tokens, record.remote_tokens, record.local_tokens)
    prompt, remote, local = ("?" if count is None else str(count) for count in counts)
    retried = f", {record.retries} retries" if record.retries else ""
    detail = f": {record.detail}" if record.detail else ""
    return (
        f"{number:>4}/{planned}  conversation {record.conversation:<3} {record.op:<11} "
        f"{record.reason or 'unknown':<16} {prompt:>5} prompt, {remote:>5} from decode, {local:>5} local, "
        f"{record.seconds:6.2f} s{retried}  {record.verdict}{detail}"
    )


def finding_lines(script: Script, records: Sequence[TurnRecord], options: VerifyOptions) -> list[str]:
    """What led to a wrong turn, the last of the records, and how to see it again."""
    record = records[-1]
    lines = [f"{record.verdict} in conversation {record.conversation}, turn {record.turn}: {record.detail}"]
    lines += [f"  {line}" for line in history(script, records, record.turn)]
    if record.warm is not None:
        lines += [f"  answer:   {record.warm!r}", f"  cold run: {record.cold!r}"]
    return [
        *lines,
        f"  seed {options.seed}; again: {options.replay()}",
        f"  this conversation alone: {options.replay(script.number)}",
    ]


def print_result(console: Console, result: Result) -> None:
    """The sums, then the verdict."""
    console.print(_reason_table(result))
    remote, local, computed = (
        sum(getattr(turn, name) or 0 for turn in result.turns)
        for name in ("remote_tokens", "local_tokens", "computed_tokens")
    )
    console.print(
        f"prompt tokens: {remote} from decode, {local} from prefill's own cache, {computed} computed"
    )
    for outage in result.outages:
        console.print(f"chaos: {outage.member} was down for {outage.seconds:.0f} s", markup=False)
    for url, usage in result.kv_cache_usage.items():
        told = "not told" if usage is None else f"{usage:.4%}"
        console.print(f"KV blocks in use in the end on {url}: {told}", markup=False)
    console.print(
        f"turns {len(result.turns)}, mismatches {result.count(Verdict.MISMATCH)}, "
        f"near ties {result.count(Verdict.NEAR_TIE)}, hung {result.count(Verdict.HUNG)}, "
        f"failed {result.count(Verdict.FAILED)}, in {result.seconds:.0f} s"
    )
    console.print(f"[bold]{escape(_summary(result))}[/]")


def write_json(path: Path, result: Result) -> None:
    """Write everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.model_dump_json(indent=2) + "\n")


def _summary(result: Result) -> str:
    if result.is_good:
        return "Every answer is the cold run's."
    if not result.turns:
        return "NOTHING WAS PLAYED."
    if result.leaking and not any(turn.detail for turn in result.turns):
        return "ENGINES KEEP KV BLOCKS of requests that have ended (or serve somebody else)."
    return "NOT VERIFIED: see above."


def _reason_table(result: Result) -> Table:
    table = Table(title="\nReuse by reason", title_justify="left")
    table.add_column("reason")
    for name in ("turns", "from decode", "local", "computed"):
        table.add_column(name, justify="right")
    for reason, *numbers in by_reason(result.turns):
        table.add_row(reason, *(str(number) for number in numbers))
    return table
