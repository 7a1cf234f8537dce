"""The router's endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv_server.router.core.engines import EngineTable, Role
from bidikv_server.router.core.requests import InvalidRequest, read_request
from bidikv_server.router.errors import BadRequest, BodyTooLarge, ClientGone
from bidikv_server.router.metrics import CONTENT_TYPE, RouterMetrics
from bidikv_server.router.openapi import describe
from bidikv_server.router.queue import Phase
from bidikv_server.router.replies import headers_of
from bidikv_server.router.watch import watch_of

if TYPE_CHECKING:
    from bidikv_server.router.access import Access
    from bidikv_server.router.core.engines import EngineSnapshot
    from bidikv_server.router.queue import TurnQueue
    from bidikv_server.router.replies import Receive, Reply, Scope
    from bidikv_server.router.responses import ResponseRoutes
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.turns import TurnService


class Routes:
    """One method per endpoint."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        engines: EngineTable,
        metrics: RouterMetrics,
        turns: TurnService,
        access: Access,
        queue: TurnQueue,
        responses: ResponseRoutes,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._responses = responses
        self._metrics = metrics
        self._turns = turns
        self._access = access
        self._queue = queue

    async def turn(self, scope: Scope, raw: bytes, reply: Reply) -> None:
        """POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages."""
        headers, watch = headers_of(scope), watch_of(scope)
        watch.arrived()
        async with self._queue.place(self._access.share(headers)):
            tenant = self._access.tenant(headers)
            watch.began(tenant)
            try:
                request = read_request(
                    scope["path"],
                    raw,
                    headers,
                    tenant=tenant,
                    normalise=self._settings.normalise_history,
                )
            except InvalidRequest as invalid:
                raise BadRequest(str(invalid), param=invalid.param) from invalid
            request = await self._responses.place(request)
            passed_on = {**self._access.engine_headers(headers), "X-Request-Id": watch.request_id}
            await self._turns.serve(request, passed_on, reply, watch)

    async def live(self, _scope: Scope, _raw: bytes, reply: Reply) -> None:
        """GET /live: 200 while the router itself works, whatever its engines do."""
        await reply.json(200, {"status": "ok"})

    async def health(self, _scope: Scope, _raw: bytes, reply: Reply) -> None:
        """GET /health: 200 while at least one engine of each role is up."""
        roles = {role: self._engines.snapshots(role) for role in Role}
        up = all(any(engine.healthy for engine in engines) for engines in roles.values())
        detail = {role.value: [_describe(engine) for engine in engines] for role, engines in roles.items()}
        await reply.json(200 if up else 503, {"status": "ok" if up else "unavailable", **detail})

    async def ready(self, _scope: Scope, _raw: bytes, reply: Reply) -> None:
        """GET /ready: 200 while new turns are taken and an engine of each role takes legs."""
        missing = [role for role in Role if not any(e.takes_legs for e in self._engines.snapshots(role))]
        if self._queue.phase is not Phase.SERVING:
            await reply.json(503, {"status": self._queue.phase})
        elif missing:
            await reply.json(503, {"status": "unavailable", "missing": missing})
        else:
            await reply.json(200, {"status": "ready"})

    async def metrics(self, _scope: Scope, _raw: bytes, reply: Reply) -> None:
        """GET /metrics in Prometheus' text format."""
        self._metrics.show_engines([engine for role in Role for engine in self._engines.snapshots(role)])
        await reply.whole(200, [(b"content-type", CONTENT_TYPE)], self._metrics.render())

    async def description(self, _scope: Scope, _raw: bytes, reply: Reply) -> None:
        """GET /openapi.json."""
        await reply.json(200, describe())


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The request's body.

    Raises:
        BodyTooLarge: It is above the limit, or says it will be.
        ClientGone: It will not come.
    """
    declared = headers_of(scope).get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit_bytes} bytes.")


def _describe(engine: EngineSnapshot) -> dict[str, Any]:
    described: dict[str, Any] = {
        "url": engine.url,
        "healthy": engine.healthy,
        "draining": engine.draining,
        "leaving": engine.leaving,
        "in_flight": engine.in_flight,
        "circuit": engine.circuit,
        "load": engine.load,
        "waiting": engine.waiting,
    }
    if engine.role is Role.DECODE:
        described["index"] = [index.address for index in engine.indexes]
    return described
