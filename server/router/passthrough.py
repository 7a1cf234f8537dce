"""Endpoints that any decode engine answers, byte for byte: models, tokenisation, token counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bidikv_server.router.core.engines import EngineTable, Role
from bidikv_server.router.errors import EngineRefusesRouter, NoEngineAvailable, UpstreamConnectFailed
from bidikv_server.router.replies import headers_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bidikv_server.router.access import Access
    from bidikv_server.router.core.engines import EngineSnapshot
    from bidikv_server.router.replies import Reply, Scope
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.upstream import Answer, EngineClient

PASSED_ON: Final = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""POST endpoints that name no conversation and compute no KV."""


class PassThrough:
    """Asks the least busy decode engine, and the next one if that cannot be reached."""

    def __init__(
        self, settings: RouterSettings, *, engines: EngineTable, client: EngineClient, access: Access
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._client = client
        self._access = access

    async def models(self, scope: Scope, _raw: bytes, reply: Reply) -> None:
        """GET /v1/models."""
        headers = self._access.engine_headers(headers_of(scope))
        timeout_s = self._settings.connect_timeout_s + self._settings.probe_timeout_s
        await self._relay(
            reply,
            lambda engine: self._client.get(engine.url, scope["path"], timeout_s=timeout_s, headers=headers),
        )

    async def post(self, scope: Scope, raw: bytes, reply: Reply) -> None:
        """POST /tokenize, /detokenize and /v1/messages/count_tokens."""
        headers = {
            **self._access.engine_headers(headers_of(scope)),
            "Content-Type": "application/json",
        }
        await self._relay(
            reply,
            lambda engine: self._client.post(
                engine.url,
                scope["path"],
                body=raw,
                headers=headers,
                timeout_s=self._settings.prefill_timeout_s,
            ),
        )

    async def _relay(self, reply: Reply, ask: Callable[[EngineSnapshot], Awaitable[Answer]]) -> None:
        answer = await self._ask(ask)
        if self._access.refused_by_engine(answer.status):
            raise EngineRefusesRouter
        await reply.whole(answer.status, answer.headers, answer.body)

    async def _ask(self, ask: Callable[[EngineSnapshot], Awaitable[Answer]]) -> Answer:
        failure: UpstreamConnectFailed | None = None
        for engine in self._candidates():
            try:
                return await ask(engine)
            except UpstreamConnectFailed as failed:
                failure = failed
        raise failure or NoEngineAvailable(Role.DECODE)

    def _candidates(self) -> list[EngineSnapshot]:
        """Decode engines that answer, those that are not being emptied first."""
        alive = [engine for engine in self._engines.snapshots(Role.DECODE) if engine.healthy]
        return sorted(alive, key=_busyness)


def _busyness(engine: EngineSnapshot) -> Any:
    return engine.draining, engine.in_flight
