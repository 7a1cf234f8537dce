"""Run the router under uvicorn, as a process of its own or inside another program's event loop."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
import threading
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from bidikv_server.router import tls
from bidikv_server.router.app import create_app
from bidikv_server.router.doorway import Bounds, guarded
from bidikv_server.router.logs import configure_logging

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator

    from bidikv_server.router.app import RouterApp
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.tls import Identity

__all__ = ["create_app", "create_server", "run"]


_log = logging.getLogger(__name__)
_GARBAGE = 10_000, 20, 50
_KEEPALIVE_S = 75
"""An agent comes back after a tool call; its connection should still be there."""


class RouterServer(uvicorn.Server):
    """A server that takes a stop signal for itself: `run` returns instead of dying of the signal afterwards.

    What uvicorn does then: it closes the listening socket and idle connections at once, lets running requests end
    within the grace period, cancels the rest, and ends the application's life. Turns that wait, or come over a
    connection that is still busy, it would let run.
    """

    def __init__(
        self, config: uvicorn.Config, app: RouterApp, identities: Iterable[Identity | None] = ()
    ) -> None:
        super().__init__(config)
        self._app = app
        self._identities = [identity for identity in identities if identity is not None]

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; once a second certificates that changed are read again."""
        if counter % 10 == 0:
            for identity in self._identities:
                identity.read_again()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new turns, then let running ones end."""
        self._app.stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM while serving, if this is the thread that signals reach."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def create_server(settings: RouterSettings) -> RouterServer:
    """A server that is not started yet, for programs that own the event loop (`await server.serve()`).

    Reads every file that the settings name, and opens no connection.

    Raises:
        SettingsError: A file cannot be used.
    """
    app = create_app(settings)
    serving = tls.serving(settings)
    config = uvicorn.Config(
        cast("Any", app),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=guarded(
            _bounds(settings),
            lambda cause: app.metrics.refused_connections.labels(cause).inc(),
            app.touch,
        ),
        ws="none",
        lifespan="on",
        interface="asgi3",
        # Its lines go where all others go; ours about each turn take the place of its access log.
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks where a client is
        timeout_keep_alive=_KEEPALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
    )
    if serving is None:
        return RouterServer(config, app, (app.upstream_identity,))
    config.load()
    # Ours: it checks clients, and takes a new certificate while it serves.
    config.ssl, own = serving
    return RouterServer(config, app, (own, app.upstream_identity))


def _bounds(settings: RouterSettings) -> Bounds:
    return Bounds(
        max_connections=settings.max_connections,
        max_head_bytes=settings.max_head_bytes,
        request_s=settings.request_timeout_s,
        stalled_s=settings.stalled_timeout_s,
    )


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files as far as this process may: every client has one, and its turn another one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning("%d open files are too few for max_connections: allow %d (ulimit -Hn)", allowed, wanted)


def run(settings: RouterSettings) -> None:
    """Serve until SIGINT or SIGTERM; running turns get `shutdown_grace_s` to end."""
    configure_logging(settings.log_format, settings.log_level)
    server = create_server(settings)
    _allow_files(2 * settings.max_connections)
    # What was loaded stays: to look for garbage in it would only hold turns up.
    gc.collect()
    gc.freeze()
    # Nearly all that a turn makes goes with its last reference; the library's own pace would look for the rest after
    # every few turns, which took a seventh of the time under load.
    gc.set_threshold(*_GARBAGE)
    server.run()
