"""Which decode engine keeps a response that a client may come back to by its name.

An engine keeps responses in its own memory, and the next turn names the last one instead of repeating its history. So the
next turn has to go there. Names are known per tenant: a foreign one is as unknown as one that never was.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.router.core.ids import fingerprint

if TYPE_CHECKING:
    from bidikv_server.router.core.digests import Digest
    from bidikv_server.router.core.ids import ConversationKey, EngineUrl


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a response is.

    Attributes:
        engine: Decode engine that gave it.
        conversation: Its conversation.
        digest: Of its whole prompt: where a request that goes on from it begins.
    """

    engine: EngineUrl
    conversation: ConversationKey
    digest: Digest


@dataclass(frozen=True, slots=True)
class _Entry:
    until_s: float
    kept: Kept


class KeptResponses:
    """Bounded memory of responses: the oldest goes first, and each expires. Times are on one monotonic clock."""

    def __init__(self, *, max_responses: int, ttl_s: float) -> None:
        self._max_responses = max_responses
        self._ttl_s = ttl_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, tenant: str, response_id: str, kept: Kept, now_s: float) -> None:
        """Remember a response."""
        self.expire(now_s)
        name = fingerprint("response", tenant, response_id)
        self._entries[name] = _Entry(now_s + self._ttl_s, kept)
        self._entries.move_to_end(name)
        while len(self._entries) > self._max_responses:
            self._entries.popitem(last=False)

    def find(self, tenant: str, response_id: str, now_s: float) -> Kept | None:
        """Where a response of this tenant is; None if it is not known. Forgets what has expired."""
        self.expire(now_s)
        entry = self._entries.get(fingerprint("response", tenant, response_id))
        return entry.kept if entry is not None else None

    def expire(self, now_s: float) -> None:
        """Forget what is past its time."""
        while self._entries and next(iter(self._entries.values())).until_s <= now_s:
            self._entries.popitem(last=False)
