"""Show a result: tables on the terminal, a picture, and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from bidikv_server.demo.results import Result, Setting


def print_result(console: Console, result: Result) -> None:
    """Tables per setting, then the answer to "is it right?"."""
    for setting in result.settings:
        console.print(_turn_table(setting))
        for line in _summary_lines(setting):
            console.print(line)
    same = "identical" if result.answers_identical else "NOT IDENTICAL"
    turns = sum(len(setting.turns) for setting in result.settings)
    console.print(f"\nAnswers of all {turns} turns with and without readback: [bold]{same}[/].")


def _turn_table(setting: Setting) -> Table:
    caching = "on" if setting.prefill_prefix_caching else "off"
    table = Table(title=f"\nPrefill's own prefix cache {caching}", title_justify="left")
    table.add_column("history", justify="right")
    table.add_column("turn", justify="right")
    for name in ("prompt", "from decode", "local", "computed", "TTFT on", "TTFT off", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("reuse")
    for index, turn in enumerate(setting.turns):
        last = index + 1 == len(setting.turns) or setting.turns[index + 1].history != turn.history
        table.add_row(
            str(turn.history),
            str(turn.turn),
            str(turn.prompt_tokens),
            str(turn.reused_remote_tokens),
            str(turn.reused_local_tokens),
            str(turn.computed_tokens),
            f"{turn.ttft_on_s:.2f} s",
            f"{turn.ttft_off_s:.2f} s",
            f"{turn.ratio:.1f}x",
            turn.reason if turn.identical else f"{turn.reason} (OTHER ANSWER)",
            end_section=last,
        )
    return table


def _summary_lines(setting: Setting) -> list[str]:
    lines = [
        f"  history {warm.history}: warm turns wait {warm.ttft_on_s:.2f} s with readback, {warm.ttft_off_s:.2f} s "
        f"without: {warm.ratio:.1f} times less (smallest {warm.smallest_ratio:.1f})"
        for warm in setting.warm
    ]
    if setting.on_growth is not None and setting.off_growth is not None:
        lines.append(
            f"  from the smallest to the largest history the wait grows {setting.on_growth:.1f} times with readback, "
            f"{setting.off_growth:.1f} times without"
        )
    return lines


def write_json(path: Path, result: Result) -> None:
    """Write the measurements."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.model_dump_json(indent=2) + "\n")


def write_plot(path: Path, result: Result) -> None:
    """Draw TTFT against prompt tokens, on and off, one panel per setting (PNG)."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (slow to import, and only here)

    figure = Figure(figsize=(5.5 * len(result.settings), 4.2), layout="constrained")
    panels = figure.subplots(1, len(result.settings), squeeze=False, sharey=True)[0]
    for panel, setting in zip(panels, result.settings, strict=True):
        for history in sorted({turn.history for turn in setting.turns}):
            warm = [turn for turn in setting.turns if turn.history == history and turn.turn > 0]
            prompts = [turn.prompt_tokens for turn in warm]
            first = history == setting.turns[0].history
            panel.plot(
                prompts, [t.ttft_off_s for t in warm], "s-", color="#b5482a", label="off" if first else None
            )
            panel.plot(
                prompts, [t.ttft_on_s for t in warm], "o-", color="#1f6f8b", label="on" if first else None
            )
        panel.set_title(f"prefill's prefix cache {'on' if setting.prefill_prefix_caching else 'off'}")
        panel.set_xlabel("prompt tokens")
        panel.grid(alpha=0.3)
        panel.legend(title="readback")
    panels[0].set_ylabel("time to first token, warm turns (s)")
    panels[0].set_ylim(bottom=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
