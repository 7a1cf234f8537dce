"""The admin API under /bidikv/v1/: conversations, draining, and the settings in effect."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.explain import explanation, summary
from bidikv_server.router.core.ids import ConversationKey, EngineUrl
from bidikv_server.router.core.json_bytes import InvalidJson, read_value
from bidikv_server.router.core.overview import ended_turn, shown_engine
from bidikv_server.router.core.tenants import is_key, presented_key
from bidikv_server.router.errors import BadRequest, MethodNotAllowed, NotFound, Unauthorized
from bidikv_server.router.replies import headers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bidikv_server.router.access import Access
    from bidikv_server.router.core.conversations import Turn
    from bidikv_server.router.core.engines import EngineTable
    from bidikv_server.router.core.history import Known
    from bidikv_server.router.releases import Releaser
    from bidikv_server.router.replies import Endpoint, Reply, Scope
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.state.store import StateStore
    from bidikv_server.router.status import RouterStatus

_log = logging.getLogger(__name__)
PREFIX: Final = "/bidikv/v1/"
_CONVERSATIONS: Final = PREFIX + "conversations"
_ONE: Final = re.compile(re.escape(_CONVERSATIONS) + r"/([0-9a-f]{32})")
_MAX_PAGE: Final = 1000
_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who asks.

    Attributes:
        tenant: Whose conversations it may see; None, the administrator, may see all.
    """

    tenant: str | None


class AdminRoutes:
    """One method per endpoint."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        engines: EngineTable,
        state: StateStore,
        clock: Callable[[], float],
        access: Access,
        releaser: Releaser,
        status: RouterStatus,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._state = state
        self._clock = clock
        self._access = access
        self._releaser = releaser
        self._status = status

    def endpoint(self, scope: Scope) -> Endpoint:
        """The endpoint of a request, if its sender may call it. Reads no body.

        Raises:
            NotFound: There is none, or the API is off.
            Unauthorized: The sender has no key that may call it.
            MethodNotAllowed: It takes other methods.
        """
        path = scope["path"]
        one = _ONE.fullmatch(path)
        if one is None and path != _CONVERSATIONS:
            return _of_method(scope, self._for_admin(scope))
        caller = self._caller(scope, may_be_tenant=True)
        if one is None:
            return _of_method(scope, {"GET": lambda scope, _raw, reply: self._list(caller, scope, reply)})
        key = ConversationKey(one[1])
        return _of_method(
            scope,
            {
                "GET": lambda _scope, _raw, reply: self._explain(caller, key, reply),
                "DELETE": lambda _scope, _raw, reply: self._release(caller, key, reply),
            },
        )

    def _for_admin(self, scope: Scope) -> Mapping[str, Endpoint]:
        endpoints: dict[str, dict[str, Endpoint]] = {
            "engines/drain": {"POST": lambda _scope, raw, reply: self._drain(raw, reply, draining=True)},
            "engines/undrain": {"POST": lambda _scope, raw, reply: self._drain(raw, reply, draining=False)},
            "config": {"GET": lambda _scope, _raw, reply: self._config(reply)},
            "overview": {"GET": lambda _scope, _raw, reply: self._overview(reply)},
            "engines": {"GET": lambda _scope, _raw, reply: self._list_engines(reply)},
            "turns": {"GET": lambda scope, _raw, reply: self._list_turns(scope, reply)},
        }
        methods = endpoints.get(scope["path"].removeprefix(PREFIX))
        if methods is None:
            raise _no_endpoint(scope)
        self._caller(scope, may_be_tenant=False)
        return methods

    def _caller(self, scope: Scope, *, may_be_tenant: bool) -> _Caller:
        headers = headers_of(scope)
        admin_key, key = self._settings.admin_key, presented_key(headers)
        if admin_key is not None and is_key(key, admin_key.digest):
            return _Caller(None)
        if may_be_tenant and self._access.by_key:
            return _Caller(self._access.tenant(headers))
        if admin_key is None:
            raise _no_endpoint(scope)
        raise Unauthorized(missing=key is None)

    async def _list(self, caller: _Caller, scope: Scope, reply: Reply) -> None:
        """GET conversations?limit=&before=&tenant=: the one used last first."""
        asked = _query(scope)
        limit, before = _limit(asked), _whole(asked, "before")
        tenant = asked.get("tenant") if caller.tenant is None else caller.tenant
        page, more = await self._state.page(limit=limit, tenant=tenant, before=before)
        now_s = self._clock()
        await reply.json(
            200,
            {
                "object": "list",
                "data": [summary(known, turns, now_s) for known, turns in page],
                "has_more": more,
                "next_before": page[-1][0].stamp if more else None,
            },
        )

    async def _explain(self, caller: _Caller, key: ConversationKey, reply: Reply) -> None:
        """GET conversations/{key}."""
        known = await self._find(caller, key)
        turns = await self._state.turns(key)
        await reply.json(200, explanation(known, turns, self._clock(), time.time()))

    async def _release(self, caller: _Caller, key: ConversationKey, reply: Reply) -> None:
        """DELETE conversations/{key}: forget it here at once, then tell the engines that hold it."""
        known = await self._find(caller, key)
        turns = await self._state.forget(key)
        outcomes = await self._releaser.release(self._addresses(turns), key)
        _log.info(
            "conversation %s of tenant %s was released: %s",
            key,
            known.tenant,
            {address: str(outcome) for address, outcome in outcomes.items()},
        )
        await reply.json(200, {"key": key, "forgotten": True, "decode": outcomes})

    async def explain_own(self, tenant: str, key: ConversationKey, reply: Reply) -> None:
        """Explain a conversation to the tenant whose it is."""
        await self._explain(_Caller(tenant), key, reply)

    async def release_own(self, tenant: str, key: ConversationKey, reply: Reply) -> None:
        """Release a conversation for the tenant whose it is."""
        await self._release(_Caller(tenant), key, reply)

    async def holders_of_own(self, tenant: str, key: ConversationKey) -> list[str]:
        """Addresses of the indexes that hold a conversation of this tenant.

        Raises:
            NotFound: It has no such conversation.
        """
        await self._find(_Caller(tenant), key)
        return self._addresses(await self._state.turns(key))

    async def _find(self, caller: _Caller, key: ConversationKey) -> Known:
        """The conversation, if the caller may see it; a foreign one is as unknown as one that never was."""
        known = await self._state.known(key, tenant=caller.tenant)
        if known is None:
            raise NotFound(f"There is no conversation {key}.")
        return known

    def _addresses(self, turns: tuple[Turn, ...]) -> list[str]:
        """Indexes that may hold these turns: those of engines that have not been restarted since."""
        engines = {engine.url: engine.indexes for engine in self._engines.snapshots(Role.DECODE)}
        holders = dict.fromkeys(turn.holder for turn in turns)
        return [
            index.address
            for holder in holders
            for index in engines.get(holder.engine, ())
            if not holder.indexes or index in holder.indexes
        ]

    async def _drain(self, raw: bytes, reply: Reply, *, draining: bool) -> None:
        """POST engines/drain and engines/undrain."""
        url = _engine_url(raw)
        engines = self._engines.drain(url, draining=draining)
        if not engines:
            raise NotFound(f"The router has no engine {url}.", param="url")
        _log.info("engine %s is %s", url, "draining" if draining else "no longer draining")
        await reply.json(
            200,
            {
                "url": url,
                "draining": draining,
                "engines": [
                    {"role": e.role, "healthy": e.healthy, "in_flight": e.in_flight} for e in engines
                ],
            },
        )

    async def _overview(self, reply: Reply) -> None:
        """GET overview: the router at a glance."""
        await reply.json(200, self._status.overview())

    async def _list_engines(self, reply: Reply) -> None:
        """GET engines: both roles, with what they told of themselves at the last probe."""
        notes = self._status.notes
        seen = [found for role in Role for found in self._engines.snapshots(role)]
        await reply.json(200, {"object": "list", "data": [shown_engine(e, notes.get(e.url)) for e in seen]})

    async def _list_turns(self, scope: Scope, reply: Reply) -> None:
        """GET turns?limit=&after=: the last ones of all conversations, the one that ended last first."""
        asked = _query(scope)
        turns = self._status.recent.latest(_limit(asked), after=_whole(asked, "after") or 0)
        now_s, wall_s = time.monotonic(), time.time()
        await reply.json(200, {"object": "list", "data": [ended_turn(turn, now_s, wall_s) for turn in turns]})

    async def _config(self, reply: Reply) -> None:
        """GET config: every setting with its value; of secrets whether they are set, of API keys how many each tenant has."""
        settings = self._settings.model_dump(mode="json")
        await reply.json(200, {**settings, "api_keys": self._access.counts()})


def _of_method(scope: Scope, methods: Mapping[str, Endpoint]) -> Endpoint:
    endpoint = methods.get(scope["method"])
    if endpoint is None:
        raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}.")
    return endpoint


def _no_endpoint(scope: Scope) -> NotFound:
    return NotFound(f"There is no endpoint {scope['path']}.")


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))


def _limit(asked: Mapping[str, str]) -> int:
    """How many the caller wants on a page."""
    limit = _whole(asked, "limit")
    if limit is not None and not 1 <= limit <= _MAX_PAGE:
        raise BadRequest(f"The parameter 'limit' must be from 1 to {_MAX_PAGE}.", param="limit")
    return _PAGE if limit is None else limit


def _whole(asked: Mapping[str, str], name: str) -> int | None:
    value = asked.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise BadRequest(f"The parameter {name!r} must be a whole number.", param=name)
    return int(value)


def _engine_url(raw: bytes) -> EngineUrl:
    try:
        body: Any = read_value(raw)
    except (InvalidJson, RecursionError):
        raise BadRequest("The request body is not valid JSON.") from None
    url = body.get("url") if isinstance(body, dict) else None
    if not isinstance(url, str):
        raise BadRequest("The field 'url' is required and must be a string.", param="url")
    return EngineUrl(url.rstrip("/"))
