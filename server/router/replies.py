"""One HTTP request's headers and its answer, over ASGI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bidikv_server.router.dialects import OPENAI, Dialect

if TYPE_CHECKING:
    from bidikv_server.router.errors import RouterFault

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_HEADERS: Final = "bidikv.headers"
RawHeaders: TypeAlias = Iterable[tuple[bytes, bytes]]


class Reply:
    """Sends a status, headers and a body, whole or in pieces, once.

    Attributes:
        started: The status is out: what comes now can only go into the body.
        ended: The whole answer is out.
        status: Which status went out; None before that.
        extra: Headers of ours; they replace the engine's own of the same name.
        dialect: In which the client hears of errors.
        events: How many server-sent events the client has been sent, as far as anyone counted.
    """

    def __init__(self, send: Send, dialect: Dialect = OPENAI) -> None:
        self.dialect = dialect
        self.events = 0
        self.started = False
        self.ended = False
        self.status: int | None = None
        self._is_event_stream = False
        self.extra: dict[bytes, bytes] = {}
        self._send = send

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        self.started, self.status = True, status
        self._is_event_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
        )
        kept = [(name, value) for name, value in headers if name not in self.extra]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*kept, *self.extra.items()]}
        )

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body at once."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """The body is complete."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send everything in one piece."""
        length = str(len(body)).encode()
        await self.start(status, [*headers, (b"content-length", length)])
        self.ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, status: int, value: Any) -> None:
        """Send a JSON document."""
        await self.whole(status, [(b"content-type", b"application/json")], json.dumps(value).encode())

    async def fault(self, fault: RouterFault) -> None:
        """Send an error in the shape of the endpoint's API."""
        headers = [(b"content-type", b"application/json")]
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(fault.retry_after_s).encode()))
        if fault.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.whole(fault.status, headers, self.dialect.error_bytes(fault))

    async def cut_off(self, fault: RouterFault) -> None:
        """End an answer before its time: with an error as far as the client can still be told of one.

        Bytes that are neither whole nor a stream of events cannot say so; there the missing end has to.
        """
        if not self.started:
            await self.fault(fault)
        elif self._is_event_stream and not self.ended:
            # A blank line first, because the stream may stand inside an event.
            await self.write(b"\n\n" + self.dialect.error_event(fault, self.events))
            await self.end()


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Request headers by lower-case name; of repeated ones the first. Read once per request."""
    known: dict[str, str] | None = scope.get(_HEADERS)
    if known is not None:
        return known
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    scope[_HEADERS] = headers
    return headers


Endpoint: TypeAlias = Callable[[Scope, bytes, Reply], Awaitable[None]]
"""Answers a request whose body has been read."""
