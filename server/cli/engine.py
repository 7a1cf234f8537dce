"""`bidikv engine`: run one prefill or decode engine in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bidikv_server.cli import reuse_options
from bidikv_server.cli.console import launch_errors
from bidikv_server.launch.idle import wait_idle
from bidikv_server.launch.machine import core_count, find_tcmalloc, vllm_platform
from bidikv_server.launch.model import check_model_path, read_card
from bidikv_server.launch.ports import require_free
from bidikv_server.launch.recipe import (
    EngineCommand,
    EngineSpec,
    ReuseSettings,
    Role,
    engine_command,
)
from bidikv_server.wire import SECRET_VARIABLE

app = typer.Typer(help="Run one vLLM engine with the bidikv connector.", no_args_is_help=True)

_DEFAULT_PORTS: dict[Role, tuple[int, int, int]] = {
    "prefill": (8100, 5600, 6800),
    "decode": (8200, 5700, 6900),
}

ModelOption = Annotated[Path, typer.Option("--model", "-m", help="Hugging Face checkpoint folder.")]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port", "-p", min=1, max=65535, help="Port of its API. Default: 8100 for prefill, 8200 for decode."
    ),
]
NixlPortOption = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of its NIXL handshake. Default: 5600, 5700.")
]
IndexPortOption = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of its retention index. Default: 6800, 6900.")
]
HostOption = Annotated[str, typer.Option(help="Address to bind to; peers must reach it.")]
NameOption = Annotated[
    str | None,
    typer.Option("--served-model-name", help="What clients call the model. Default: the folder's name."),
]
StockOption = Annotated[
    bool, typer.Option("--stock", help="No readback and nothing retained, as stock vLLM.")
]
PrintOption = Annotated[bool, typer.Option("--print", help="Print the command instead of running it.")]
VllmArgs = Annotated[
    list[str] | None, typer.Argument(metavar="VLLM_ARGS", help="What follows `--`: passed to vLLM as it is.")
]


@app.command()
def prefill(
    *,
    model: ModelOption,
    port: PortOption = None,
    nixl_port: NixlPortOption = None,
    index_port: IndexPortOption = None,
    host: HostOption = "127.0.0.1",
    served_model_name: NameOption = None,
    recompute_threshold: reuse_options.ThresholdOption = reuse_options.DEFAULT_THRESHOLD,
    stock: StockOption = False,
    only_print: PrintOption = False,
    vllm_args: VllmArgs = None,
) -> None:
    """Run a prefill engine: it computes prompts, and reads back what decode retained of them.

    Engines that share a deployment take the same secret from $BIDIKV_SECRET.
    """
    ports = (port, nixl_port, index_port)
    _run(
        "prefill",
        model=model,
        ports=ports,
        host=host,
        served_model_name=served_model_name,
        reuse=reuse_options.settings(threshold=recompute_threshold),
        stock=stock,
        only_print=only_print,
        vllm_args=vllm_args,
    )


@app.command()
def decode(
    *,
    model: ModelOption,
    port: PortOption = None,
    nixl_port: NixlPortOption = None,
    index_port: IndexPortOption = None,
    host: HostOption = "127.0.0.1",
    served_model_name: NameOption = None,
    retention_ttl: reuse_options.TtlOption = reuse_options.DEFAULT_TTL_S,
    protected_share: reuse_options.ShareOption = reuse_options.DEFAULT_SHARE,
    stock: StockOption = False,
    only_print: PrintOption = False,
    vllm_args: VllmArgs = None,
) -> None:
    """Run a decode engine: it generates, and retains its blocks for the conversation's next turn.

    Engines that share a deployment take the same secret from $BIDIKV_SECRET.
    """
    ports = (port, nixl_port, index_port)
    _run(
        "decode",
        model=model,
        ports=ports,
        host=host,
        served_model_name=served_model_name,
        reuse=reuse_options.settings(ttl_s=retention_ttl, share=protected_share),
        stock=stock,
        only_print=only_print,
        vllm_args=vllm_args,
    )


@app.command("wait-idle")
def wait_idle_(
    *,
    url: Annotated[str, typer.Option(help="Base URL of the engine.", metavar="URL")],
    settle: Annotated[
        float, typer.Option(min=0, help="Wait at least this long: until routers have noticed.", metavar="S")
    ] = 0,
    timeout: Annotated[float, typer.Option(min=0, help="Give up after this long.", metavar="S")] = 600,
) -> None:
    """Wait until an engine runs no request, before it is stopped: for a container's preStop hook.

    Exit code 0 when it is idle or gone, 1 when requests still run at the end.
    """
    with launch_errors():
        wait_idle(url, settle_s=settle, timeout_s=timeout)


def _run(
    role: Role,
    *,
    model: Path,
    ports: tuple[int | None, int | None, int | None],
    host: str,
    served_model_name: str | None,
    reuse: ReuseSettings,
    stock: bool,
    only_print: bool,
    vllm_args: list[str] | None,
) -> None:
    port, nixl_port, index_port = (
        given or default for given, default in zip(ports, _DEFAULT_PORTS[role], strict=True)
    )
    with launch_errors():
        folder = check_model_path(model)
        command = engine_command(
            EngineSpec(
                role,
                folder,
                port,
                nixl_port,
                index_port,
                vllm_platform(),
                card=read_card(folder),
                readback=not stock,
                reuse=reuse,
                secret=os.environ.get(SECRET_VARIABLE),
                served_model_name=served_model_name,
                tcmalloc=find_tcmalloc(),
                cpu_threads=max(1, core_count() // 2),
                host=host,
                extra_args=tuple(vllm_args or ()),
            )
        )
        if only_print:
            typer.echo(command.shell())
            return
        require_free(host, port)
        require_free(host, nixl_port, "--nixl-port")
        if role == "decode" and not stock:
            require_free(host, index_port, "--index-port")
        _become(command)


def _become(command: EngineCommand) -> None:
    """Replace this process, so that signals and the exit code are vLLM's own."""
    os.execvpe(command.argv[0], command.argv, command.environment(os.environ))  # noqa: S606
