"""HTTP/1.1 to engines: kept-alive connections on the event loop's own transports, parsed by httptools.

Why not a client library: a turn is two requests and hundreds of chunks, and a library costs several times what the rest of
the router does (docs/design/0006-upstream-client.md). This is the part of HTTP that engines speak: one request at a
time on a connection, a body that is complete, an answer that is read as it comes. No redirects, cookies, proxies,
compression or retries.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Headers = tuple[tuple[bytes, bytes], ...]

_HIGH_WATER_BYTES: Final = 2**18
"""So much of an answer may wait for its reader before the engine has to."""
_MAX_HEAD_BYTES: Final = 2**18
"""Of an answer's headers."""


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

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        unused: Callable[[Connection], None],
        touch: Callable[[], None] | None,
    ) -> None:
        """Wait to be opened.

        Args:
            loop: Of the connection.
            unused: Told when it has rested for as long as `rest` says.
            touch: Told of every packet.
        """
        self._loop = loop
        self._unused = unused
        self._touch = touch
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
        self._deadline_s = math.inf
        self._idle_s = math.inf
        self._rests_until_s: float | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._looks_at_s = math.inf

    @property
    def reusable(self) -> bool:
        """The last answer is complete and read to its end, and the connection may carry another one."""
        transport = self._transport
        if not self._complete or self._chunks:
            # What is left would become the beginning of somebody else's answer.
            return False
        return self._keep_alive and transport is not None and not transport.is_closing()

    def start(self, request: bytes, body: bytes, deadline_s: float = math.inf) -> None:
        """Send a request.

        Args:
            request: Line and headers.
            body: What follows them.
            deadline_s: On the loop's clock: no wait for the answer lasts longer, until `give_up_after` says otherwise.

        Raises:
            ConnectionBroke: The server has closed the connection meanwhile.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionBroke("the engine closed the connection")
        self._rests_until_s, self._deadline_s, self._idle_s = None, deadline_s, math.inf
        self._look_at(deadline_s)
        self._headers, self._head_bytes, self._has_head, self._complete = [], 0, False, False
        self._transport.writelines((request, body) if body else (request,))

    async def head(self) -> tuple[int, Headers]:
        """Wait for status and headers, names in lower case.

        Raises:
            ConnectionBroke: They do not come.
            TimeoutError: They do not come in time.
        """
        while not self._has_head:
            await self._more()
        return self._status, tuple(self._headers)

    async def read(self) -> bytes:
        """What has come of the body since the last call; waits if that is nothing, and is empty at the end.

        Raises:
            ConnectionBroke: The end will not come.
            TimeoutError: Nothing came in time.
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
        """From now on there is no deadline, but a read that waits so long fails."""
        self._deadline_s, self._idle_s = math.inf, idle_s
        self._look_at(self._loop.time() + idle_s)

    def close(self) -> None:
        """Close at once; an engine that works on the answer aborts."""
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()

    def rest(self, until_s: float) -> None:
        """The exchange is over; without another one the connection counts as unused at this time of the loop's clock."""
        self._rests_until_s = until_s
        self._look_at(until_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse what came, and wake the reader once."""
        if self._touch is not None:
            self._touch()
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
        self._waits_since_s = self._loop.time()
        if self._waits_since_s >= self._deadline_s:
            raise TimeoutError
        self._waiter = self._loop.create_future()
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

    def _look_at(self, at_s: float) -> None:
        """Look at this time, or before it.

        A connection has one timer for all it waits for, and that is set anew only when it would come too late: exchanges and
        reads are many, and mostly over before.
        """
        if at_s < self._looks_at_s:
            if self._watch is not None:
                self._watch.cancel()
            self._watch, self._looks_at_s = self._loop.call_at(at_s, self._look), at_s

    def _look(self) -> None:
        """End what has lasted long enough, and look again when the rest could have."""
        self._watch, self._looks_at_s = None, math.inf
        now_s = self._loop.time()
        waiter = self._waiter
        is_waiting = waiter is not None and not waiter.done()
        if self._rests_until_s is not None:
            due_s = self._rests_until_s
        else:
            due_s = min(self._deadline_s, (self._waits_since_s if is_waiting else now_s) + self._idle_s)
        if due_s > now_s:
            if due_s < math.inf:
                self._look_at(due_s)
        elif self._rests_until_s is not None:
            self._unused(self)
        elif waiter is not None and is_waiting:
            waiter.set_exception(TimeoutError())


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
