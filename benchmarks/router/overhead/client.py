"""An HTTP client that costs little: one kept-alive connection, one request at a time, no queue and no copies."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Final

import httptools

_STAMP: Final = re.compile(rb'"content": ?"(\d+)"')


class BrokenAnswerError(RuntimeError):
    """A system under test gave an answer that cannot be counted."""


@dataclass(slots=True)
class Sight:
    """What all connections of a load see while it counts. Times are nanoseconds on the machine's monotonic clock.

    Attributes:
        counting: The warm-up is over and the end has not come.
        first_ns: Of every answer, from the turn's first request to the first event or byte of its body.
        transit_ns: Of every event, from the engine's write to its arrival here.
        reads: How many reads the bodies took: events that arrive together are one.
        turns: Turns that ended.
    """

    counting: bool = False
    first_ns: list[int] = field(default_factory=list)
    transit_ns: list[int] = field(default_factory=list)
    reads: int = 0
    turns: int = 0


class Connection(asyncio.Protocol):
    """One connection to a local port, opened again when the server closes it."""

    def __init__(self, port: int, sight: Sight) -> None:
        self._port = port
        self._sight = sight
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._started_ns: int | None = None
        self._body = b""
        self._streamed = False
        self._saw_done = False
        self._rest = b""
        self._parser = httptools.HttpResponseParser(self)

    async def send(self, request: bytes, started_ns: int | None) -> None:
        """Write a whole request and wait for the end of the answer.

        Args:
            request: Headers and body.
            started_ns: When the turn began whose answer this is; None for a leg that nobody but its sender sees.

        Raises:
            BrokenAnswerError: It is no success, or a stream that did not end well.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        assert self._transport is not None  # noqa: S101  # the line above set it
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = loop.create_future()
        self._started_ns = started_ns
        self._streamed = self._saw_done = False
        self._body = self._rest = b""
        self._transport.write(request)
        await self._waiting
        status = self._parser.get_status_code()
        if status != 200 or (self._streamed and not self._saw_done):
            raise BrokenAnswerError(f"status {status}: {self._body[:300]!r}")

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        """An answer that was under way is lost."""
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(BrokenAnswerError(f"the connection was closed ({error!r})"))

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Only the content type matters."""
        if name.lower() == b"content-type":
            self._streamed = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        """Take times off the events."""
        now_ns, sight = time.monotonic_ns(), self._sight
        if sight.counting and self._started_ns is not None:
            sight.first_ns.append(now_ns - self._started_ns)
        self._started_ns = None
        if not self._streamed:
            self._body += body
            return
        whole, _, self._rest = (self._rest + body).rpartition(b"\n")
        if sight.counting:
            sight.reads += 1
            sight.transit_ns += [now_ns - int(stamp) for stamp in _STAMP.findall(whole)]
        self._saw_done = self._saw_done or b"[DONE]" in whole

    def on_message_complete(self) -> None:
        """Hand the answer over."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
