"""The client to the engines: whole answers and streamed ones, and the place where transport errors become router faults."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from bidikv_server.router.core.json_bytes import encode
from bidikv_server.router.errors import UpstreamConnectFailed, UpstreamFault, UpstreamTimedOut
from bidikv_server.router.http1 import ConnectionBroke, Origin, request_head
from bidikv_server.router.pool import ConnectFailed, Pool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
    from types import TracebackType
    from typing import Self

    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.http1 import Connection, Headers

_KEEPALIVE_S: Final = 4.0
"""vLLM's server closes idle connections after 5 s; letting go first avoids sending into a closing one."""
_DROPPED_HEADERS: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"server",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers of one connection, not of the answer."""

_TARGET: Final = re.compile(r"[A-Za-z0-9/._~?&=%:@!$'()*+,;-]+")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an engine.

    Attributes:
        status: HTTP status.
        headers: Those that belong to the answer, names in lower case.
        body: Bytes as they came.
    """

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """An answer whose body has begun to come.

    Attributes:
        status: HTTP status.
        headers: Those that belong to the answer, names in lower case.
        is_event_stream: The body is server-sent events.
        first: The body's first bytes; empty if it ended without any.
        rest: The body's other bytes, as they arrive; raises an `UpstreamFault` if it breaks off.
    """

    status: int
    headers: Headers
    is_event_stream: bool
    first: bytes
    rest: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            UpstreamFault: It broke off.
        """
        return self.first + b"".join([chunk async for chunk in self.rest])


@dataclass(frozen=True, slots=True)
class StreamWaits:
    """How long a streamed answer may keep us waiting, in seconds.

    Attributes:
        first_byte_s: From sending the request to the first bytes of the body.
        idle_s: Between two reads after that.
    """

    first_byte_s: float
    idle_s: float


class EngineClient:
    """Connections to all engines."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        touch: Callable[[], None] | None = None,
    ) -> None:
        """Say how to connect; nothing is opened yet.

        Args:
            connect_timeout_s: To open a connection, in seconds.
            tls: For engines whose URL is https; None checks them by the machine's authorities.
            touch: Told of every packet.
        """
        self._pool = Pool(connect_timeout_s=connect_timeout_s, idle_s=_KEEPALIVE_S, tls=tls, touch=touch)

    async def __aenter__(self) -> Self:
        """Connections are made on demand."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        self._pool.close()

    async def get(
        self, url: EngineUrl, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Fetch something small.

        Raises:
            UpstreamFault: The engine did not answer.
        """
        return await self._whole(url, _head("GET", url, path, headers or {}, 0), b"", timeout_s)

    async def post(
        self,
        url: EngineUrl,
        path: str,
        *,
        body: Mapping[str, Any] | bytes,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Answer:
        """Send a request and wait for its whole answer, `timeout_s` at most.

        Raises:
            UpstreamFault: The engine did not answer.
        """
        data = _encoded(body)
        return await self._whole(url, _head("POST", url, path, headers, len(data)), data, timeout_s)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        url: EngineUrl,
        path: str,
        *,
        body: Mapping[str, Any] | bytes | None,
        headers: Mapping[str, str],
        waits: StreamWaits,
        began: Callable[[bytes], bool] | None = None,
    ) -> AsyncGenerator[StreamedAnswer]:
        """Send a request and wait for its answer's first bytes.

        Leaving before the end closes the connection, which makes the engine abort the request.

        Args:
            url: Engine.
            path: Endpoint.
            body: JSON, or what becomes JSON; None asks with GET.
            headers: As the engine gets them.
            waits: How long each wait may be.
            began: Says of the bytes so far whether the answer proper has begun; first bytes of an event stream are
                collected until it has. None takes what comes first.

        Raises:
            UpstreamFault: The engine did not answer.
        """
        data = b"" if body is None else _encoded(body)
        head = _head("GET" if body is None else "POST", url, path, headers, len(data))
        origin, mapped = _origin(url), _Mapped(url)
        with mapped:
            connection = await self._pool.take(origin)
        try:
            with mapped:
                connection.start(head, data, _now_s() + waits.first_byte_s)
                status, received = await connection.head()
                is_events = _is_event_stream(received)
                first = await connection.read()
                while is_events and began is not None and not began(first):
                    more = await connection.read()
                    if not more:
                        break
                    first += more
            connection.give_up_after(waits.idle_s)
            yield StreamedAnswer(status, _kept(received), is_events, first, _rest(url, connection))
        finally:
            # What is left unread closes it.
            self._pool.give_back(origin, connection)

    async def _whole(self, url: EngineUrl, head: bytes, data: bytes, timeout_s: float) -> Answer:
        origin, deadline_s = _origin(url), _now_s() + timeout_s
        with _Mapped(url):
            connection = await self._pool.take(origin)
            try:
                connection.start(head, data, deadline_s)
                status, received = await connection.head()
                pieces = []
                while piece := await connection.read():
                    pieces.append(piece)
            finally:
                self._pool.give_back(origin, connection)
        return Answer(status, _kept(received), b"".join(pieces))


def _now_s() -> float:
    """On the clock of the connections' deadlines."""
    return asyncio.get_running_loop().time()


async def _rest(url: EngineUrl, connection: Connection) -> AsyncIterator[bytes]:
    with _Mapped(url):
        while chunk := await connection.read():
            yield chunk


@functools.lru_cache(maxsize=1024)
def _origin(url: EngineUrl) -> Origin:
    return Origin.of(url)


def _head(method: str, url: EngineUrl, path: str, headers: Mapping[str, str], length: int) -> bytes:
    """Line and headers. A path may hold what a client wrote there, and must not end the line before its time."""
    target = path if _TARGET.fullmatch(path) else quote(path, safe="/?&=%:@!$'()*+,;~")
    return request_head(method, target, _origin(url), headers, length)


def _encoded(body: Mapping[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else encode(body)


def _kept(headers: Headers) -> Headers:
    return tuple(header for header in headers if header[0] not in _DROPPED_HEADERS)


def _is_event_stream(headers: Headers) -> bool:
    return any(
        name == b"content-type" and value.partition(b";")[0].strip().lower() == b"text/event-stream"
        for name, value in headers
    )


class _Mapped:
    """Turns the connection's errors into router faults; their messages name the engine and never a prompt."""

    __slots__ = ("_url",)

    def __init__(self, url: EngineUrl) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, ConnectFailed):
            raise UpstreamConnectFailed(_why_unreachable(self._url, error.__cause__)) from error
        if isinstance(error, TimeoutError):
            raise UpstreamTimedOut(f"Engine {self._url} did not answer in time.") from error
        if isinstance(error, ConnectionBroke):
            raise UpstreamFault(f"The connection to engine {self._url} broke: {error}.") from error


def _why_unreachable(url: EngineUrl, cause: BaseException | None) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = cause.verify_message or "another name"
        return f"The certificate of engine {url} is not trusted: {why} (setting 'upstream_ca_file')."
    return f"Engine {url} cannot be reached ({type(cause).__name__})."
