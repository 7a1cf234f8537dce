"""`bidikv router`: serve the OpenAI API in front of prefill and decode engines."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads annotations)
from typing import Annotated

import typer

from bidikv_server.cli.console import fail, launch_errors, require_extra
from bidikv_server.launch.ports import require_free


def router(
    *,
    prefill: Annotated[
        list[str] | None, typer.Option(help="Base URL of a prefill engine; repeat for more.", metavar="URL")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="Base URL of a decode engine; repeat for more.", metavar="URL")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any of the router's settings.", metavar="FILE")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="Port to listen on. Default: 8000.")
    ] = None,
    readback: Annotated[
        bool | None,
        typer.Option("--readback/--no-readback", help="Let prefill read back what decode retained."),
    ] = None,
) -> None:
    """Route turns over prefill and decode engines.

    Options win over BIDIKV_ROUTER_* variables, which win over the file.
    """
    with launch_errors():
        require_extra(
            "router", "aiohttp", "httptools", "prometheus_client", "pydantic_settings", "uvicorn", "uvloop"
        )
        from bidikv_server.router.server import run  # noqa: PLC0415  (an optional extra)
        from bidikv_server.router.settings import RouterSettings, SettingsError  # noqa: PLC0415

        overrides = {
            "prefill": tuple(prefill or ()) or None,
            "decode": tuple(decode or ()) or None,
            "host": host,
            "port": port,
            "readback": readback,
        }
        try:
            settings = RouterSettings.load(config, **overrides)
        except SettingsError as error:
            raise fail(f"router settings: {error}", 2) from None
        if settings.port:
            require_free(settings.host, settings.port)
        run(settings)
