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
    api_keys_file: Annotated[
        Path | None,
        typer.Option(help="TOML file of API keys to tenants; read again when it changes.", metavar="FILE"),
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Turns that run at once. Default: as many as come.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Turns that wait for one of them; beyond, status 429. Default: 100.")
    ] = None,
    shutdown_grace: Annotated[
        float | None,
        typer.Option(help="Seconds for running turns after a stop signal. Default: 30.", metavar="S"),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. Default: info.")
    ] = None,
    readback: Annotated[
        bool | None,
        typer.Option("--readback/--no-readback", help="Let prefill read back what decode retained."),
    ] = None,
) -> None:
    """Route turns over prefill and decode engines.

    Options win over BIDIKV_ROUTER_* variables, which win over the file. Secrets are no options: the file or the
    variables BIDIKV_ROUTER_API_KEY, BIDIKV_ROUTER_UPSTREAM_API_KEY, BIDIKV_ROUTER_ADMIN_KEY and BIDIKV_SECRET give them.
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
            "api_keys_file": api_keys_file,
            "max_in_flight": max_in_flight,
            "max_queue": max_queue,
            "shutdown_grace_s": shutdown_grace,
            "log_level": log_level,
        }
        try:
            settings = RouterSettings.load(config, **overrides)
            if settings.port:
                require_free(settings.host, settings.port)
            run(settings)
        except SettingsError as error:
            raise fail(f"router settings: {error}", 2) from None
