"""The store of a router that shares nothing: its own memory."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bidikv_server.router.state.store import Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv_server.router.core.conversations import ConversationTable, Holder, Match, Turn
    from bidikv_server.router.core.digests import Chain
    from bidikv_server.router.core.history import History, Known, TurnRecord
    from bidikv_server.router.core.ids import ConversationKey, Scope
    from bidikv_server.router.core.kept import Kept, KeptResponses


_SWEEP_S: Final = 0.2
"""Between two looks for idle conversations: a lookup that met an hour's worth of them would take seconds."""


class MemoryStore:
    """A conversation table, a history and the responses that engines keep, on one clock; implements `StateStore`."""

    def __init__(
        self, table: ConversationTable, history: History, kept: KeptResponses, clock: Callable[[], float]
    ) -> None:
        self.table = table
        self.history = history
        self._kept = kept
        self._clock = clock
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to forget idle conversations."""
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Stop that."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeping

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = self._clock()
            self.table.expire(now_s)
            self.history.expire(now_s)
            self._kept.expire(now_s)

    async def find(self, scope: Scope, session: str | None, chain: Chain) -> Match:
        """Place a request."""
        return self.table.find(scope, session, chain, self._clock())

    async def commit(self, match: Match, scope: Scope, record: TurnRecord, holder: Holder | None) -> None:
        """Remember a turn that ended well."""
        now_s = self._clock()
        self.history.record(match.key, scope, replace(record, at_s=now_s))
        if holder is not None:
            self.table.commit(match, holder, now_s)

    async def known(self, key: ConversationKey, *, tenant: str | None = None) -> Known | None:
        """What became of a conversation's last turns."""
        return self.history.find(key, self._clock(), tenant=tenant)

    async def turns(self, key: ConversationKey) -> tuple[Turn, ...]:
        """A conversation's turns, oldest first."""
        self.table.expire(self._clock())
        return self.table.turns(key)

    async def page(self, *, limit: int, tenant: str | None = None, before: int | None = None) -> Page:
        """Conversations, the one used last first."""
        found, more = self.history.page(self._clock(), limit=limit, tenant=tenant, before=before)
        return Page(tuple((known, len(self.table.turns(known.key))) for known in found), more)

    async def forget(self, key: ConversationKey) -> tuple[Turn, ...]:
        """Forget a conversation; returns its turns."""
        turns = await self.turns(key)
        self.table.forget(key)
        self.history.forget(key)
        return turns

    def keep_response(self, tenant: str, response_id: str, kept: Kept) -> None:
        """Remember where a response is."""
        self._kept.keep(tenant, response_id, kept, self._clock())

    async def response(self, tenant: str, response_id: str) -> Kept | None:
        """Where a response of this tenant is."""
        return self._kept.find(tenant, response_id, self._clock())
