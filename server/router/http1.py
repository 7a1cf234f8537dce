"""HTTP/1.1 to engines: kept-alive connections on the event loop's own transports, parsed by httptools.

Why not a client library: a turn is two requests and hundreds of chunks, and a library costs several times what the rest of
the router does (docs/design/0006-upstream-client.md). This is the part of HTTP that engines speak: one request at a
time on a connection, a body that is complete, an answer that is read as it comes. No redirects, cookies, proxies,
compression or retries.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httptools

if TYPE_CHECKING:
    from collections.abc import Mapping

Headers = tuple[tuple[bytes, bytes], ...]

_HIGH_WATER_BYTES: Final = 2**18
"""So much of an answer may wait for its reader before the engine has to."""
_MAX_HEAD_BYTES: Final = 2**18
"""Of an answer's headers."""


class ConnectFailed(OSError):  # noqa: N818
    """No connection could be opened. The cause is the system's own error, or a timeout."""


class ConnectionBroke(OSError):  # noqa: N818
    """The connection ended before the answer did, or what came over it is no answer."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go.

    Attributes:
        host: Name or address.
        port: Of the server.
        authority: What the request says of both.
        is_tls: The connection is encrypted.
    """

    host: str
    port: int
    authority: str
    is_tls: bool

    @classmethod
    def of(cls, url: str) -> Origin:
        """The origin of a base URL (`http://host:port`)."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if is_tls else 80), parts.netloc, is_tls)


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time: `start`, then `head`, then `read` until nothing comes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._chunks: list[bytes] = []
        self._waiting_bytes = 0
        self._paused = False
        self._has_head = False
        self._complete = True
        self._keep_alive = True
        self._error: ConnectionBroke | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since_s = 0.0
        self._watch: asyncio.TimerHandle | None = None

    @property
    def reusable(self) -> bool:
        """The last answer is complete and read to its end, and the connection may carry another one."""
        transport = self._transport
        if not self._complete or self._chunks:
            # What is left would become the beginning of somebody else's answer.
            return False
        return self._keep_alive and transport is not None and not transport.is_closing()

    def start(self, request: bytes, body: bytes) -> None:
        """Send a request.

        Raises:
            ConnectionBroke: The server has closed the connection meanwhile.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionBroke("the engine closed the connection")
        self._headers, self._head_bytes, self._has_head, self._complete = [], 0, False, False
        self._transport.writelines((request, body) if body else (request,))

    async def head(self) -> tuple[int, Headers]:
        """Wait for status and headers, names in lower case.

        Raises:
            ConnectionBroke: They do not come.
        """
        while not self._has_head:
            await self._more()
        return self._status, tuple(self._headers)

    async def read(self) -> bytes:
        """What has come of the body since the last call; waits if that is nothing, and is empty at the end.

        Raises:
            ConnectionBroke: The end will not come.
            TimeoutError: Nothing came for as long as `give_up_after` says.
        """
        while not self._chunks:
            if self._complete:
                return b""
            await self._more()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._waiting_bytes = 0
        if self._paused:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        return data

    def give_up_after(self, idle_s: float) -> None:
        """From now on let a read that waits so long fail. One timer watches all reads: chunks are many."""
        self._watch = self._loop.call_later(idle_s, self._look, idle_s)

    def close(self) -> None:
        """Close at once; an engine that works on the answer aborts."""
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()

    def rest(self) -> None:
        """The exchange is over: stop watching it."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse what came, and wake the reader once."""
        if self._complete:
            # Nobody asked for it: whatever it belongs to, it must not become the next request's answer.
            self._broke("the engine spoke out of turn")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._broke("the engine's answer is not HTTP/1.1")
            return
        if self._waiting_bytes > _HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The end of the connection is the end of an answer that announced none."""
        self._transport = None
        if self._complete:
            return
        if error is None and self._has_head and self._ends_with_connection():
            self._complete = True
            self._wake()
        else:
            self._broke("the engine closed the connection")

    def on_message_begin(self) -> None:
        """Another answer behind the one that was asked for is none of ours."""
        if self._has_head:
            raise ConnectionBroke("the engine spoke out of turn")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEAD_BYTES:
            raise ConnectionBroke("the answer's headers are too large")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the status. Informational answers precede the answer proper."""
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._has_head = True
            self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._chunks.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        """The answer is complete, unless it was only informational."""
        if self._has_head:
            self._complete = True
        else:
            self._headers = []

    def _ends_with_connection(self) -> bool:
        return not any(name in {b"content-length", b"transfer-encoding"} for name, _ in self._headers)

    async def _more(self) -> None:
        """Wait until something comes."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._waits_since_s = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _broke(self, why: str) -> None:
        self._error, self._keep_alive = ConnectionBroke(why), False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)
        if self._transport is not None:
            self._transport.abort()

    def _look(self, idle_s: float) -> None:
        """Fail a read that has waited long enough, and look again when the next one could have."""
        waiter, left_s = self._waiter, idle_s
        if waiter is not None and not waiter.done():
            left_s = self._waits_since_s + idle_s - self._loop.time()
            if left_s <= 0:
                waiter.set_exception(TimeoutError())
                return
        self._watch = self._loop.call_later(left_s, self._look, idle_s)


class Pool:
    """Connections to all engines; idle ones are kept for the next exchange. One event loop only."""

    def __init__(self, *, connect_timeout_s: float, idle_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Say how to connect.

        Args:
            connect_timeout_s: To open a connection.
            idle_s: An idle connection is closed after so long.
            tls: For origins that want it; None checks them by the machine's authorities.
        """
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._tls = tls
        self._idle: dict[Origin, dict[Connection, asyncio.TimerHandle]] = {}
        self._open: set[Connection] = set()

    async def take(self, origin: Origin) -> Connection:
        """A connection, the one used last if any is idle.

        Raises:
            ConnectFailed: None could be opened.
        """
        idle = self._idle.get(origin)
        while idle:
            connection, closing = idle.popitem()
            closing.cancel()
            if connection.reusable:
                return connection
            self._drop(connection)
        return await self._connect(origin)

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for later, or close it if it cannot be used again."""
        if not connection.reusable:
            self._drop(connection)
            return
        connection.rest()
        closing = asyncio.get_running_loop().call_later(self._idle_s, self._expire, origin, connection)
        self._idle.setdefault(origin, {})[connection] = closing

    def close(self) -> None:
        """Close every connection, busy ones too."""
        for idle in self._idle.values():
            for closing in idle.values():
                closing.cancel()
        self._idle.clear()
        for connection in self._open:
            connection.close()
        self._open.clear()

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), origin.host, origin.port, ssl=self._context(origin)
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


def request_head(method: str, target: str, origin: Origin, headers: Mapping[str, str], length: int) -> bytes:
    """A request's line and headers.

    Args:
        method: Of HTTP.
        target: Path and query, percent-encoded.
        origin: Of the server.
        headers: Names and values; one that could begin another line is refused.
        length: Of the body, in bytes.

    Raises:
        ValueError: A part cannot be sent.
    """
    lines = [f"{method} {target} HTTP/1.1", f"Host: {origin.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length or method == "POST":
        lines.append(f"Content-Length: {length}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise ValueError("a header holds a line end")
    return f"{text}\r\n\r\n".encode("latin-1")
