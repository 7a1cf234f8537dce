"""The client side of a run: aiohttp, down to whether a stream ended as it should."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from bidikv.headers import REUSE_HEADER, ReuseHeader
from bidikv_server.verify.answers import Answer, AnswerBuilder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType
    from typing import Self

    from bidikv_server.verify.requests import Request

_USAGE: Final = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)
_DATA: Final = b"data:"
_MAX_LINE_BYTES: Final = 2**22
_PAGE_TIMEOUT_S: Final = 5.0


class FailureKind(StrEnum):
    """How a request failed."""

    HTTP_ERROR = "http_error"
    """A status above 299 with an error in OpenAI's shape."""
    CONNECTION = "connection"
    """The connection could not be made, or broke."""
    ERROR_EVENT = "error_event"
    """The stream said that it failed."""
    TRUNCATED = "truncated"
    """Status 200 and a proper end, but neither the end marker nor an error."""
    MALFORMED = "malformed"
    """Not what the API promises."""
    HUNG = "hung"


class RequestFailed(Exception):  # noqa: N818
    """A request without an answer.

    Attributes:
        kind: How.
        status: HTTP status, if one came.
    """

    def __init__(self, kind: FailureKind, message: str, status: int | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.status = status

    @property
    def clear(self) -> bool:
        """The client was told, and may well try again."""
        if self.kind is FailureKind.HTTP_ERROR:
            return self.status is not None and self.status >= 500
        return self.kind in {FailureKind.CONNECTION, FailureKind.ERROR_EVENT}


class Client:
    """Requests to one router."""

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the pool; connections are made on demand."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_MAX_LINE_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, request: Request) -> Answer:
        """Send a request and read its whole answer.

        Raises:
            RequestFailed: There is none.
        """
        async with self._post(request) as response:
            builder = AnswerBuilder()
            if request.body.get("stream"):
                await _read_stream(response, builder)
            else:
                _add(builder, await response.read())
            return builder.build(ReuseHeader.parse(response.headers.get(REUSE_HEADER)))

    async def ask_and_leave(self, request: Request) -> None:
        """Send a streamed request, and hang up after its first event.

        Raises:
            RequestFailed: It failed before that.
        """
        async with self._post(request) as response:
            await response.content.readline()

    async def get(self, url: str) -> str | None:
        """A page's text; None if it cannot be had."""
        try:
            async with asyncio.timeout(_PAGE_TIMEOUT_S), self._open().get(url, headers=self._headers) as page:
                return await page.text() if page.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def models(self) -> list[dict[str, Any]] | None:
        """What the router says that it serves; None if it does not answer."""
        page = await self.get(f"{self._url}/v1/models")
        if page is None:
            return None
        try:
            return list(json.loads(page)["data"])
        except (ValueError, KeyError, TypeError):
            return None

    async def kv_cache_usage(self, engine_url: str) -> float | None:
        """The highest share of KV blocks in use on an engine's ranks; None if it does not tell."""
        page = await self.get(f"{engine_url}/metrics")
        values = [float(match["value"]) for match in _USAGE.finditer(page or "")]
        return max(values, default=None)

    @asynccontextmanager
    async def _post(self, request: Request) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200; whatever goes wrong until the block is left becomes a `RequestFailed`."""
        headers = {**self._headers, **request.headers}
        url = f"{self._url}{request.path}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._open().post(url, json=request.body, headers=headers) as response,
            ):
                if response.status != 200:
                    raise _http_error(response.status, await response.read())
                yield response
        except TimeoutError:
            raise RequestFailed(
                FailureKind.HUNG, f"no complete answer within {self._timeout_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(FailureKind.CONNECTION, f"{type(error).__name__}: {error}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside its `async with`")
        return self._session


async def _read_stream(response: aiohttp.ClientResponse, builder: AnswerBuilder) -> None:
    async for line in response.content:
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == b"[DONE]":
            return
        _add(builder, data)
    raise RequestFailed(FailureKind.TRUNCATED, "the stream ended without [DONE] and without an error", 200)


def _add(builder: AnswerBuilder, data: bytes) -> None:
    try:
        body: Mapping[str, Any] = json.loads(data)
        error = body.get("error")
        if error is None:
            builder.add(body)
            return
    except (ValueError, AttributeError) as fault:
        raise RequestFailed(FailureKind.MALFORMED, f"{fault} in {data[:200]!r}", 200) from fault
    raise RequestFailed(FailureKind.ERROR_EVENT, json.dumps(error)[:300], 200)


def _http_error(status: int, raw: bytes) -> RequestFailed:
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return RequestFailed(FailureKind.MALFORMED, f"status {status} with {raw[:200]!r}", status)
    return RequestFailed(FailureKind.HTTP_ERROR, f"status {status}: {message}", status)
