"""One HTTP request's headers and its answer, over ASGI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

from bidikv_server.router.errors import RouterFault, error_bytes

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

RawHeaders: TypeAlias = Iterable[tuple[bytes, bytes]]


class Reply:
    """Sends a status, headers and a body, whole or in pieces, once.

    Attributes:
        started: The status is out: what comes now can only go into the body.
        extra: Headers of ours; they replace the engine's own of the same name.
    """

    def __init__(self, send: Send) -> None:
        self.started = False
        self.extra: dict[bytes, bytes] = {}
        self._send = send

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers."""
        self.started = True
        kept = [(name, value) for name, value in headers if name not in self.extra]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*kept, *self.extra.items()]}
        )

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body at once."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """The body is complete."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send everything in one piece."""
        length = str(len(body)).encode()
        await self.start(status, [*headers, (b"content-length", length)])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, status: int, value: Any) -> None:
        """Send a JSON document."""
        await self.whole(status, [(b"content-type", b"application/json")], json.dumps(value).encode())

    async def fault(self, fault: RouterFault) -> None:
        """Send an error in OpenAI's shape."""
        headers = [(b"content-type", b"application/json")]
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(fault.retry_after_s).encode()))
        if fault.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.whole(fault.status, headers, error_bytes(fault))


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Request headers by lower-case name; of repeated ones the first."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers
