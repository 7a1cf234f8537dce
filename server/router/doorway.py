"""Clients' connections: uvicorn's protocol with bounds on what a client may send, hold and delay before the application sees it.

uvicorn waits for ever for a request to arrive and takes headers of any size. Here a request has to arrive whole in its
time, headers have a size, connections a number, and a client that takes nothing of its answer loses it.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bidikv_server.router.dialects import OPENAI
from bidikv_server.router.errors import BadRequest, HeadTooLarge, RequestTooSlow, TooManyConnections
from bidikv_server.router.joined_writes import JoinedWrites

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from bidikv_server.router.errors import RouterFault

_MAX_HEADERS: Final = 256
"""Of one request: each costs more than its bytes."""
_PHRASES: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may do.

    Attributes:
        max_connections: Open at once, of all clients.
        max_head_bytes: Of a request's target and headers.
        request_s: For a request to arrive whole, from the connection's opening or the request's first byte.
        stalled_s: How long an answer may wait for its client to take more of it.
    """

    max_connections: int
    max_head_bytes: int
    request_s: float
    stalled_s: float


class Doorway(HttpToolsProtocol):
    """One client's connection. `guarded` makes the class that uvicorn gets."""

    bounds: Bounds
    refused: Callable[[str], None]
    touch: Callable[[], None] | None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # A client's mistakes are counted; a line for each would let it fill the disk.
        self.logger = _LOGGER
        self._reads_head = True
        self._arrives = False
        self._head_bytes = self._header_bytes = 0
        self._fault: RouterFault | None = None
        self._running: RequestResponseCycle | None = None
        self._hangs_up = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let the client in if there is room."""
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop)
        if len(self.connections) > self.bounds.max_connections:
            self._refuse(TooManyConnections())
            return
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is not None and (peer := transport.get_extra_info("socket")) is not None:
            # The kernel watches who takes nothing: it costs no timer for each chunk.
            peer.setsockopt(socket.IPPROTO_TCP, option, round(self.bounds.stalled_s * 1000))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is running, also where another one waits behind it, and forget those that wait."""
        self._unwatch()
        self.pipeline.clear()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, as long as it is within bounds."""
        if self.touch is not None:
            self.touch()
        if self._hangs_up or self.transport.is_closing():
            return
        if self._reads_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._hangs_up or self.transport.is_closing():
            return
        if self._reads_head and self._head_bytes > self.bounds.max_head_bytes:
            self._refuse(HeadTooLarge(self.bounds.max_head_bytes))
        elif self._deadline is None and (self._arrives or self._head_bytes):
            # Most requests arrive in one piece, and need no timer.
            self._watch()

    def on_message_begin(self) -> None:
        """A request begins, maybe right behind another one."""
        super().on_message_begin()
        self._header_bytes, self._arrives = 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self.bounds.max_head_bytes or len(self.headers) >= _MAX_HEADERS:
            self._fault = HeadTooLarge(self.bounds.max_head_bytes)
            raise ValueError("too many headers")  # ends the parsing; the answer is sent below
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """What follows is the body, which the application counts."""
        self._reads_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request has arrived."""
        self._reads_head, self._arrives = True, False
        self._unwatch()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, in the shape of every other error."""
        self._refuse(self._fault or BadRequest(f"{msg.removesuffix('.')}: it is not HTTP/1.1."))

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(self.bounds.request_s, self._late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        """Time is up for a request, unless it only waits behind another one's answer."""
        if self._answers():
            self._watch()
        else:
            self._deadline = None
            self._refuse(RequestTooSlow(self.bounds.request_s))

    def _refuse(self, fault: RouterFault) -> None:
        """Hang up: with this answer, or after the one to an earlier request, which it could be taken for."""
        self._unwatch()
        self.refused(fault.code)
        running = self._running
        if running is not None and self._answers():
            self._hangs_up = True
            self.flow.pause_reading()
            self.pipeline.clear()
            running.keep_alive = False
            return
        if running is None or running.response_complete or not running.response_started:
            self.transport.write(_answer(fault))
        self._disconnect()
        self.transport.close()

    def _answers(self) -> bool:
        """A request that has arrived whole is being answered."""
        running = self._running
        return running is not None and not running.response_complete and not running.more_body

    def _disconnect(self) -> None:
        """Whatever the application still says goes nowhere."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)


_LOGGER: Final = logging.getLogger(f"{__name__}.uvicorn")
_LOGGER.setLevel(logging.ERROR)


def guarded(
    bounds: Bounds, refused: Callable[[str], None], touch: Callable[[], None] | None = None
) -> type[Doorway]:
    """A protocol class with these bounds.

    Args:
        bounds: Of every connection.
        refused: Hears the cause of every connection that is hung up on.
        touch: Told of every packet.
    """

    class Guarded(Doorway):
        pass

    Guarded.bounds, Guarded.refused = bounds, staticmethod(refused)
    Guarded.touch = staticmethod(touch) if touch is not None else None
    return Guarded


def _answer(fault: RouterFault) -> bytes:
    body = OPENAI.error_bytes(fault)
    lines = [
        f"HTTP/1.1 {fault.status} {_PHRASES[fault.status]}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if fault.retry_after_s is not None:
        lines.append(f"retry-after: {fault.retry_after_s}")
    return "\r\n".join([*lines, "", ""]).encode() + body
