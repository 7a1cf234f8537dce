"""`bidikv demo`: measure what readback saves, on real engines."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads annotations)
from typing import Annotated

import typer

from bidikv_server.cli.console import launch_errors, require_extra, stop_signals


def demo(
    *,
    json: Annotated[Path | None, typer.Option(help="Write the measurements here.", metavar="FILE")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the time to first token here (PNG).", metavar="FILE")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer turns: a few minutes on two cores.")] = False,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="Hugging Face checkpoint folder. Default: SmolLM2-135M."),
    ] = None,
) -> None:
    """Run an agent's turns with and without readback, check the answers, and show the times to first token."""
    with launch_errors(), stop_signals():
        require_extra("demo", "langgraph", "langchain_core", "matplotlib")
        from bidikv_server.demo import run_demo  # noqa: PLC0415  (an optional extra)
        from bidikv_server.demo.options import DemoOptions  # noqa: PLC0415

        raise typer.Exit(run_demo(DemoOptions(json=json, plot=plot, quick=quick, model=model)))
