"""Connections to all engines, opened on demand and kept between exchanges (`http1` is what they speak)."""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from typing import TYPE_CHECKING

from bidikv_server.router.http1 import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv_server.router.http1 import Origin


class ConnectFailed(OSError):  # noqa: N818
    """No connection could be opened. The cause is the system's own error, or a timeout."""


class Pool:
    """Connections to all engines; idle ones are kept for the next exchange. One event loop only."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        idle_s: float,
        tls: ssl.SSLContext | None = None,
        touch: Callable[[], None] | None = None,
    ) -> None:
        """Say how to connect.

        Args:
            connect_timeout_s: To open a connection.
            idle_s: An idle connection is closed after so long.
            tls: For origins that want it; None checks them by the machine's authorities.
            touch: Told of every packet.
        """
        self._touch = touch
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._tls = tls
        self._idle: dict[Origin, dict[Connection, None]] = {}
        self._open: set[Connection] = set()

    async def take(self, origin: Origin) -> Connection:
        """A connection, the one used last if any is idle.

        Raises:
            ConnectFailed: None could be opened.
        """
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if connection.reusable:
                return connection
            self._drop(connection)
        return await self._connect(origin)

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for later, or close it if it cannot be used again."""
        if not connection.reusable:
            self._drop(connection)
            return
        connection.rest(asyncio.get_running_loop().time() + self._idle_s)
        self._idle.setdefault(origin, {})[connection] = None

    def close(self) -> None:
        """Close every connection, busy ones too."""
        self._idle.clear()
        for connection in self._open:
            connection.close()
        self._open.clear()

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, partial(self._expire, origin), self._touch),
                    origin.host,
                    origin.port,
                    ssl=self._context(origin),
                )
        except (OSError, UnicodeError) as error:  # a timeout, too; and a name that cannot be one
            raise ConnectFailed(str(error)) from error
        self._open.add(connection)
        return connection

    def _context(self, origin: Origin) -> ssl.SSLContext | None:
        if not origin.is_tls:
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _expire(self, origin: Origin, connection: Connection) -> None:
        self._idle[origin].pop(connection, None)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        connection.close()
        self._open.discard(connection)
