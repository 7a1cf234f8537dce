"""The commands of `bidikv`, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from bidikv._version import __version__
from bidikv_server.cli import demo, doctor, engine, model, router, up, verify

app = typer.Typer(
    name="bidikv",
    help="Bi-directional KV reuse for agents on prefill/decode-disaggregated vLLM.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong use or a missing extra, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bidikv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that come before the command."""


app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("router")(router.router)
app.command("verify")(verify.verify)
app.add_typer(engine.app, name="engine")
app.add_typer(model.app, name="model")
