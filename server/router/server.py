"""Run the router under uvicorn, as a process of its own or inside another program's event loop."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from bidikv_server.router.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bidikv_server.router.settings import RouterSettings

__all__ = ["create_app", "create_server", "run"]


_KEEPALIVE_S = 75
"""An agent comes back after a tool call; its connection should still be there."""


class RouterServer(uvicorn.Server):
    """A server that takes a stop signal for itself: `run` returns instead of dying of the signal afterwards."""

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
    """A server that is not started yet, for programs that own the event loop (`await server.serve()`)."""
    config = uvicorn.Config(
        cast("Any", create_app(settings)),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEPALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
    )
    return RouterServer(config)


def run(settings: RouterSettings) -> None:
    """Serve until SIGINT or SIGTERM; running turns get `shutdown_grace_s` to end."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    create_server(settings).run()
