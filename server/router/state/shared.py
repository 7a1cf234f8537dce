"""The store of routers that share a Redis or Valkey server: each one's own memory, and what all of them know."""

from __future__ import annotations

import asyncio
import logging
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.router.core.ids import chain_key, fingerprint, session_key
from bidikv_server.router.core.merging import merged
from bidikv_server.router.state.codec import (
    BadValue,
    Reader,
    expect,
    holder_name,
    read_kept,
    read_match,
    response_name,
    write_holder,
    write_kept,
    write_told,
)
from bidikv_server.router.state.connection import Script
from bidikv_server.router.state.outage import Circuit, Write
from bidikv_server.router.state.store import Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv_server.router.core.conversations import Holder, Match, Turn
    from bidikv_server.router.core.digests import Chain
    from bidikv_server.router.core.history import Known, TurnRecord
    from bidikv_server.router.core.ids import ConversationKey, Scope
    from bidikv_server.router.core.kept import Kept
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.state.memory import MemoryStore
    from bidikv_server.router.state.metrics import StateMetrics

_log = logging.getLogger(__name__)

_MAX_PREFIXES: Final = 1024
"""Of a longer prompt the shortest prefixes are not looked for: its own conversation's turns are its last ones."""
_DEPTH: Final = struct.Struct(">I")


class Bounds:
    """What the server may hold, as in a router's own memory.

    Attributes:
        max_conversations: Conversations.
        max_turns: Turns of each.
        max_records: Of those, how many it tells about.
        max_responses: Responses that engines keep.
        response_ttl_ms: How long each is remembered, in milliseconds.
        idle_ms: Without a turn for so long, a conversation is forgotten; in milliseconds.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.max_conversations = settings.max_conversations
        self.max_turns = settings.max_turns
        self.max_records = settings.max_records
        self.max_responses = settings.max_responses
        self.response_ttl_ms = max(1, round(settings.response_ttl_s * 1000))
        self.idle_ms = max(1, round(settings.conversation_idle_s * 1000))


class SharedStore:
    """A router's own memory in front of the server; implements `StateStore`.

    Every turn is in both. So an outage costs what other routers learnt meanwhile, and an emptied server nothing that this
    router has seen.
    """

    def __init__(
        self,
        memory: MemoryStore,
        circuit: Circuit,
        metrics: StateMetrics,
        *,
        bounds: Bounds,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._circuit = circuit
        self._metrics = metrics
        self._bounds = bounds
        self._clock = clock
        self._writing: set[asyncio.Future[Any]] = set()
        self._find, self._commit, self._forget = map(Script, ("find", "commit", "forget"))
        self._explain, self._page, self._keep, self._kept = map(Script, ("explain", "page", "keep", "kept"))

    async def open(self) -> None:
        """Look whether the server is there. If it is not, the router starts all the same."""
        await self._memory.open()
        await self._circuit.open()

    async def close(self) -> None:
        """Let writes under way end, and close connections."""
        if self._writing:
            await asyncio.wait(self._writing)
        await self._circuit.close()
        await self._memory.close()

    async def find(self, scope: Scope, session: str | None, chain: Chain) -> Match:
        """Place a request, with one call to the server."""
        own = await self._memory.find(scope, session, chain)
        key = chain_key(scope, chain.whole.hex()) if session is None else session_key(scope, session)
        skipped = max(0, len(chain.prefixes) - _MAX_PREFIXES)
        digests = b"".join(chain.prefixes[skipped:])
        answer = await self._circuit.read(
            "find", self._find, bytes.fromhex(key), b"0" if session is None else b"1", digests
        )
        if answer is None:
            return own
        try:
            shared, gone, bad = read_match(answer, chain, skipped)
        except BadValue as error:
            self._doubt(1, error)
            return own
        self._doubt(bad)
        if gone:
            await self._memory.forget(shared.key)
            own = await self._memory.find(scope, session, chain)
        return merged(own, shared)

    async def commit(self, match: Match, scope: Scope, record: TurnRecord, holder: Holder | None) -> None:
        """Remember a turn here, and tell the others: until the server has it, or has failed to answer in time.

        A client that leaves meanwhile stops neither.
        """
        now_s = self._clock()
        await self._memory.commit(match, scope, record, holder)
        arguments: tuple[bytes | str | float, ...] = (
            bytes.fromhex(match.key),
            _tenant(scope.tenant),
            write_told(scope, replace(record, at_s=now_s)),
            self._bounds.max_records,
            int(now_s * 1e6),
            self._bounds.idle_ms,
            self._bounds.max_conversations,
        )
        if holder is not None:
            data = write_holder(holder)
            arguments += (
                holder_name(data),
                data,
                match.digest or b"",
                match.own.digest if match.own is not None else b"",
                _DEPTH.pack(match.depth),
                self._bounds.max_turns,
            )
        odd = await self._write("commit", self._commit, *arguments)
        self._doubt(odd if type(odd) is int else 0)

    async def known(self, key: ConversationKey, *, tenant: str | None = None) -> Known | None:
        """What became of a conversation's last turns, wherever they ran."""
        explained = await self._explained(key, tenant)
        own = await self._memory.known(key, tenant=tenant)
        shared = explained[0] if explained is not None else None
        if shared is None:
            return own
        return shared if tenant in {None, shared.tenant} else None

    async def turns(self, key: ConversationKey) -> tuple[Turn, ...]:
        """A conversation's turns, oldest first."""
        explained = await self._explained(key)
        return (explained[1] if explained is not None else ()) or await self._memory.turns(key)

    async def page(self, *, limit: int, tenant: str | None = None, before: int | None = None) -> Page:
        """Conversations of all routers; of this one while the server is away."""
        answer = await self._circuit.read(
            "page",
            self._page,
            b"" if tenant is None else _tenant(tenant),
            "+inf" if before is None else f"({before}",
            limit + 1,
        )
        if answer is None:
            return await self._memory.page(limit=limit, tenant=tenant, before=before)
        try:
            return self._read_page(answer, limit, tenant)
        except BadValue as error:
            self._doubt(1, error)
            return await self._memory.page(limit=limit, tenant=tenant, before=before)

    async def forget(self, key: ConversationKey) -> tuple[Turn, ...]:
        """Forget a conversation here and, when they next look for it, on all routers."""
        known = await self.known(key)
        own = await self._memory.forget(key)
        tenant = _tenant(known.tenant) if known is not None else b""
        answer = await self._write("forget", self._forget, bytes.fromhex(key), tenant, self._bounds.idle_ms)
        if answer is None:
            return own
        try:
            odd, turns, holders = expect(answer, list)
            reader = Reader()
            reader.holders(holders)
            found = reader.turns(turns)
            self._doubt(expect(odd, int) + reader.bad)
        except (BadValue, ValueError) as error:
            self._doubt(1, error)
            return own
        return tuple({turn.digest: turn for turn in (*own, *found)}.values())

    def keep_response(self, tenant: str, response_id: str, kept: Kept) -> None:
        """Remember where a response is, here at once and on the server soon: nobody can name it before it has begun."""
        self._memory.keep_response(tenant, response_id, kept)
        self._begin_write(
            "keep",
            self._keep,
            response_name(tenant, response_id),
            write_kept(kept),
            int(self._clock() * 1e6),
            self._bounds.response_ttl_ms,
            self._bounds.max_responses,
        )

    async def response(self, tenant: str, response_id: str) -> Kept | None:
        """Where a response of this tenant is; the server is asked only for what this router does not know."""
        own = await self._memory.response(tenant, response_id)
        if own is not None:
            return own
        answer = await self._circuit.read("kept", self._kept, response_name(tenant, response_id))
        if answer is None or answer == b"":
            return None
        try:
            return read_kept(answer)
        except BadValue as error:
            self._doubt(1, error)
            return None

    async def _write(self, name: str, script: Script, *arguments: bytes | str | float) -> Any:
        return await asyncio.shield(self._begin_write(name, script, *arguments))

    def _begin_write(self, name: str, script: Script, *arguments: bytes | str | float) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(self._circuit.write(Write(name, script, arguments)))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def _explained(
        self, key: ConversationKey, tenant: str | None = None
    ) -> tuple[Known | None, tuple[Turn, ...]] | None:
        asker = b"" if tenant is None else _tenant(tenant)
        answer = await self._circuit.read("explain", self._explain, bytes.fromhex(key), asker)
        if answer is None:
            return None
        try:
            odd, gone, stamp, recent, turns, holders = expect(answer, list)
            reader = Reader()
            reader.holders(holders)
            told = expect(recent, list)
            found = reader.known(key, told, stamp), reader.turns(turns)
        except (BadValue, ValueError) as error:
            self._doubt(1, error)
            return None
        self._doubt(expect(odd, int) + reader.bad)
        if gone:
            await self._memory.forget(key)
        return found

    def _read_page(self, answer: Any, limit: int, tenant: str | None) -> Page:
        odd, *rows = expect(answer, list)
        reader = Reader()
        found: list[tuple[Known, int]] = []
        for row in rows[:limit]:
            name, stamp, data, turns = expect(row, list)
            known = reader.listed(name, stamp, data)
            if known is not None and tenant in {None, known.tenant}:
                found.append((known, expect(turns, int)))
        self._doubt(expect(odd, int) + reader.bad)
        return Page(tuple(found), bool(found) and len(rows) > limit)

    def _doubt(self, bad: int, error: Exception | None = None) -> None:
        if bad:
            self._metrics.bad_values.inc(bad)
            _log.debug("left out %d values of the shared state: %s", bad, error or "of another shape")


def _tenant(tenant: str) -> bytes:
    """Name of a tenant's list: a tenant may be called anything."""
    return bytes.fromhex(fingerprint("state", tenant))
