"""The client to the engines: the router's only user of aiohttp, and the place where transport errors become router faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from bidikv_server.router.errors import UpstreamConnectFailed, UpstreamFault, UpstreamTimedOut

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from bidikv_server.router.core.ids import EngineUrl

_KEEPALIVE_S: Final = 4.0
"""vLLM's server closes idle connections after 5 s; letting go first avoids sending into a closing one."""
_DROPPED_HEADERS: Final = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "server",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of one connection, not of the answer."""

Headers = tuple[tuple[bytes, bytes], ...]


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

    def __init__(self, *, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Say how to connect; nothing is opened yet.

        Args:
            connect_timeout_s: To open a connection, in seconds.
            tls: For engines whose URL is https; None checks them by the machine's authorities.
        """
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the pool; connections are made on demand."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=self._tls if self._tls is not None else True
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def get(
        self, url: EngineUrl, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Fetch something small.

        Raises:
            UpstreamFault: The engine did not answer.
        """
        with _mapped(url):
            async with self._open().get(
                url + path, headers=headers, timeout=self._timeout(timeout_s), allow_redirects=False
            ) as response:
                return Answer(response.status, _kept(response), await response.read())

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
        with _mapped(url):
            async with self._open().post(
                url + path,
                data=_encode(body),
                headers=headers,
                timeout=self._timeout(timeout_s),
                allow_redirects=False,
            ) as response:
                return Answer(response.status, _kept(response), await response.read())

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
        response: aiohttp.ClientResponse | None = None
        try:
            with _mapped(url):
                async with asyncio.timeout(waits.first_byte_s):
                    response = await self._open().request(
                        "GET" if body is None else "POST",
                        url + path,
                        data=None if body is None else _encode(body),
                        headers=headers,
                        timeout=self._timeout(),
                        allow_redirects=False,
                    )
                    first = await response.content.readany()
                    is_events = response.content_type == "text/event-stream"
                    while is_events and began is not None and not began(first):
                        more = await response.content.readany()
                        if not more:
                            break
                        first += more
            rest = _rest(url, response, waits.idle_s)
            yield StreamedAnswer(response.status, _kept(response), is_events, first, rest)
        finally:
            if response is not None:
                response.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engine client is used before it is entered")
        return self._session

    def _timeout(self, total_s: float | None = None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=self._connect_timeout_s)


async def _rest(url: EngineUrl, response: aiohttp.ClientResponse, idle_s: float) -> AsyncIterator[bytes]:
    while True:
        with _mapped(url):
            async with asyncio.timeout(idle_s):
                chunk = await response.content.readany()
        if not chunk:
            return
        yield chunk


def _encode(body: Mapping[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode("ascii")


def _kept(response: aiohttp.ClientResponse) -> Headers:
    lowered = ((name.lower(), value) for name, value in response.raw_headers)
    return tuple((name, value) for name, value in lowered if name.decode("latin-1") not in _DROPPED_HEADERS)


@contextlib.contextmanager
def _mapped(url: EngineUrl) -> Iterator[None]:
    """Turn aiohttp's errors into router faults; their messages name the engine and never a prompt."""
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or "another name"
        raise UpstreamConnectFailed(
            f"The certificate of engine {url} is not trusted: {why} (setting 'upstream_ca_file')."
        ) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UpstreamConnectFailed(f"Engine {url} cannot be reached ({type(error).__name__}).") from error
    except TimeoutError as error:
        raise UpstreamTimedOut(f"Engine {url} did not answer in time.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFault(f"The connection to engine {url} broke ({type(error).__name__}).") from error
