"""A client's transport that sends an answer's head together with the first bytes of its body.

The server writes the head by itself: a system call and a wake-up of the client more for every answer, at the moment that
counts most.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_HEAD: Final = b"HTTP/1.1 "


class JoinedWrites(asyncio.Transport):
    """Passes everything on; a head waits for the next write, and for no longer than the loop's present round."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: Any) -> None:
        """Send bytes, in the order in which they come."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Send what is left, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._head = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the transport knows of the connection."""
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol take over."""
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        if self._head:
            data, self._head = self._head, b""
            self._transport.write(data)
