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
        list[str] | None,
        typer.Option(
            help="Base URL of a prefill engine, or a name to look up: dns://NAME:PORT, dns://_SERVICE._PROTO.NAME. "
            "Repeat for more.",
            metavar="URL",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="The same of a decode engine; repeat for more.", metavar="URL")
    ] = None,
    engines_file: Annotated[
        Path | None,
        typer.Option(
            help="TOML or JSON file with lists prefill and decode; read again when it changes.",
            metavar="FILE",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any of the router's settings.", metavar="FILE")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="Port to listen on. Default: 8000.")
    ] = None,
    tls_cert_file: Annotated[
        Path | None,
        typer.Option(help="PEM certificate: serve HTTPS; read again when it changes.", metavar="FILE"),
    ] = None,
    tls_key_file: Annotated[
        Path | None, typer.Option(help="PEM key of the certificate.", metavar="FILE")
    ] = None,
    tls_client_ca_file: Annotated[
        Path | None,
        typer.Option(help="PEM authorities: clients need a certificate of one of them.", metavar="FILE"),
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
    log_format: Annotated[
        str | None, typer.Option(help="text, or json: one object per line. Default: text.")
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(
            help="How KV gets from engine to engine: bidikv, nixl, nixl-bidirectional, nixl-push, mooncake, lmcache,"
            " or some joined by +. Default: bidikv."
        ),
    ] = None,
    readback: Annotated[
        bool | None,
        typer.Option("--readback/--no-readback", help="Let prefill read back what decode retained."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check all settings and the files they name, print what is in effect, and exit."
        ),
    ] = False,
    list_settings: Annotated[
        bool, typer.Option("--settings", help="Print every setting with default, unit and meaning, and exit.")
    ] = False,
) -> None:
    """Route turns over prefill and decode engines.

    These options are a part of the settings: `--settings` lists all. Options win over BIDIKV_ROUTER_* variables, which win
    over the file. Secrets are no options: the file or the variables BIDIKV_ROUTER_API_KEY, BIDIKV_ROUTER_UPSTREAM_API_KEY,
    BIDIKV_ROUTER_ADMIN_KEY and BIDIKV_SECRET give them.
    """
    with launch_errors():
        require_extra(
            "router",
            "dns",
            "httptools",
            "msgspec",
            "prometheus_client",
            "pydantic_settings",
            "uvicorn",
            "uvloop",
        )
        from bidikv_server.router import effective, reference  # noqa: PLC0415  (an optional extra)
        from bidikv_server.router.server import create_server, run  # noqa: PLC0415
        from bidikv_server.router.settings import RouterSettings, SettingsError  # noqa: PLC0415

        if list_settings:
            typer.echo(reference.as_text())
            return

        overrides = {
            "prefill": tuple(prefill or ()) or None,
            "decode": tuple(decode or ()) or None,
            "engines_file": engines_file,
            "host": host,
            "port": port,
            "transfer": transfer,
            "readback": readback,
            "tls_cert_file": tls_cert_file,
            "tls_key_file": tls_key_file,
            "tls_client_ca_file": tls_client_ca_file,
            "api_keys_file": api_keys_file,
            "max_in_flight": max_in_flight,
            "max_queue": max_queue,
            "shutdown_grace_s": shutdown_grace,
            "log_level": log_level,
            "log_format": log_format,
        }
        try:
            settings = RouterSettings.load(config, **overrides)
            if check:
                create_server(settings)
                typer.echo(effective.as_toml(settings))
                return
            if settings.port:
                require_free(settings.host, settings.port)
            run(settings)
        except SettingsError as error:
            raise fail(f"router settings: {error}", 2) from None
