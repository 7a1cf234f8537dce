"""Responses that an engine keeps: where a request goes that names one, and how a client gets one back or stops it."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlencode

from bidikv_server.router.core.answers import conceal_transfer
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.ids import tenant_of
from bidikv_server.router.core.paths import RESPONSES_PATH
from bidikv_server.router.core.requests import continued, credential_of
from bidikv_server.router.core.sse import answer_began
from bidikv_server.router.errors import (
    BadRequest,
    EngineRefusesRouter,
    ResponseUnreachable,
    UnknownResponse,
)
from bidikv_server.router.relay import LegFailed, RefusedByEngine, relay
from bidikv_server.router.replies import headers_of
from bidikv_server.router.upstream import StreamWaits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bidikv_server.router.access import Access
    from bidikv_server.router.core.engines import EngineTable
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.core.kept import Kept
    from bidikv_server.router.core.requests import TurnRequest
    from bidikv_server.router.replies import Endpoint, Reply, Scope
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.state.store import StateStore
    from bidikv_server.router.upstream import EngineClient

_ONE: Final = re.compile(rf"{re.escape(RESPONSES_PATH)}/([A-Za-z0-9_-]{{1,128}})(/cancel)?")
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}


class ResponseRoutes:
    """One method per endpoint. Only engines that were started with a store keep anything."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        engines: EngineTable,
        client: EngineClient,
        access: Access,
        state: StateStore,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._client = client
        self._access = access
        self._state = state

    async def place(self, request: TurnRequest) -> TurnRequest:
        """The request with a name for its answer, and with the place of the response that it goes on from.

        Names are the router's: an engine keeps responses by them, and a client that chose one could write over another's.

        Raises:
            UnknownResponse: The caller has no such response.
        """
        if request.path != RESPONSES_PATH:
            return request
        named = replace(request, response_id=f"resp_{uuid.uuid4().hex}")
        previous = request.previous_response
        if previous is None:
            return named
        kept = await self._find(request.scope.tenant, previous)
        return continued(named, kept, normalise=self._settings.normalise_history)

    def endpoints(self, path: str) -> dict[str, Endpoint] | None:
        """The methods of one response's endpoints; None if the path is none of them."""
        match = _ONE.fullmatch(path)
        if match is None:
            return None
        return {"POST": self.cancel} if match[2] else {"GET": self.retrieve}

    async def retrieve(self, scope: Scope, _raw: bytes, reply: Reply) -> None:
        """GET /v1/responses/{id}, whole or as the stream of events that is left of one in the background."""
        query = _query(scope)
        await self._pass_on(scope, reply, query=f"?{urlencode(query)}" if query else "", body=None)

    async def cancel(self, scope: Scope, _raw: bytes, reply: Reply) -> None:
        """POST /v1/responses/{id}/cancel."""
        await self._pass_on(scope, reply, query="", body=b"")

    async def _pass_on(self, scope: Scope, reply: Reply, *, query: str, body: bytes | None) -> None:
        headers = headers_of(scope)
        kept = await self._find(self._tenant(headers), _response_id(scope))
        self._check_reachable(kept.engine)
        waits = StreamWaits(self._settings.decode_timeout_s, self._settings.idle_timeout_s)
        async with self._client.stream(
            kept.engine,
            scope["path"] + query,
            body=body,
            headers=self._access.engine_headers(headers),
            waits=waits,
        ) as answer:
            if self._access.refused_by_engine(answer.status):
                raise EngineRefusesRouter
            try:
                await relay(answer, reply, _nothing, show=conceal_transfer, last_resort=True)
            except RefusedByEngine as refused:
                await reply.whole(refused.answer.status, refused.answer.headers, refused.answer.body)
            except LegFailed as failed:
                if failed.answer is None:
                    raise failed.fault from failed
                await reply.whole(failed.answer.status, failed.answer.headers, failed.answer.body)

    def _tenant(self, headers: Mapping[str, str]) -> str:
        tenant = self._access.tenant(headers)
        return tenant_of(credential_of(headers)) if tenant is None else tenant

    async def _find(self, tenant: str, response_id: str) -> Kept:
        kept = await self._state.response(tenant, response_id)
        if kept is None or not any(e.url == kept.engine for e in self._engines.snapshots(Role.DECODE)):
            raise UnknownResponse(response_id)
        return kept

    def _check_reachable(self, url: EngineUrl) -> None:
        if not any(engine.url == url and engine.healthy for engine in self._engines.snapshots(Role.DECODE)):
            raise ResponseUnreachable


async def _nothing() -> None:
    """What has ended is no turn of a conversation."""


def began_of(request: TurnRequest) -> Callable[[bytes], bool] | None:
    """What tells that a streamed answer has begun; None if its first byte does.

    A Responses stream opens with events that say nothing yet: until more comes, another engine may still do better. What
    runs in the background says at once under which name.
    """
    return answer_began if request.path == RESPONSES_PATH and not request.background else None


def _response_id(scope: Scope) -> str:
    match = _ONE.fullmatch(scope["path"])
    return match[1] if match is not None else ""


def _query(scope: Scope) -> dict[str, Any]:
    """What of the query engines know.

    Raises:
        BadRequest: A value is wrong.
    """
    try:
        asked = parse_qs(scope.get("query_string", b"").decode("ascii"), max_num_fields=32)
    except (UnicodeDecodeError, ValueError):
        raise BadRequest("The query string cannot be read.") from None
    query: dict[str, Any] = {}
    if "stream" in asked:
        if (flag := _FLAGS.get(asked["stream"][-1].lower())) is None:
            raise BadRequest("The query parameter 'stream' must be true or false.", param="stream")
        query["stream"] = str(flag).lower()
    if "starting_after" in asked:
        number = asked["starting_after"][-1]
        if not re.fullmatch(r"[0-9]{1,18}", number):
            raise BadRequest(
                "The query parameter 'starting_after' must be a whole number.", param="starting_after"
            )
        query["starting_after"] = number
    return query
