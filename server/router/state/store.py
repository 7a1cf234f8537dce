"""What the router remembers from turn to turn, as its edges see it: one store in memory, one that routers share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from bidikv_server.router.core.conversations import Holder, Match, Turn
    from bidikv_server.router.core.digests import Chain
    from bidikv_server.router.core.history import Known, TurnRecord
    from bidikv_server.router.core.ids import ConversationKey, Scope
    from bidikv_server.router.core.kept import Kept


class Page(NamedTuple):
    """Part of a list of conversations.

    Attributes:
        found: The one used last first; of each its last record, and how many turns of it are known.
        more: There are more after it.
    """

    found: tuple[tuple[Known, int], ...]
    more: bool


class StateStore(Protocol):
    """Where turns are found again. Belongs to the router's event loop; no method raises for a reason outside the router."""

    async def open(self) -> None:
        """Get ready, before the first request."""

    async def close(self) -> None:
        """Let go of what `open` took."""

    async def find(self, scope: Scope, session: str | None, chain: Chain) -> Match:
        """Place a request among the known turns. Reads and never consumes."""

    async def commit(self, match: Match, scope: Scope, record: TurnRecord, holder: Holder | None) -> None:
        """Remember a turn that ended well. When this returns, the conversation's next turn finds it.

        Args:
            match: Its place, as `find` gave it.
            scope: Whose it is.
            record: What became of it.
            holder: Where it may be read back from; None leaves the conversation's earlier turns its last ones.
        """

    async def known(self, key: ConversationKey, *, tenant: str | None = None) -> Known | None:
        """What became of a conversation's last turns; None if it is unknown or, given a tenant, not that tenant's."""

    async def turns(self, key: ConversationKey) -> tuple[Turn, ...]:
        """A conversation's turns, oldest first."""

    async def page(self, *, limit: int, tenant: str | None = None, before: int | None = None) -> Page:
        """Conversations, of one tenant or all, that were last used before a stamp."""

    async def forget(self, key: ConversationKey) -> tuple[Turn, ...]:
        """Forget a conversation; returns its turns. One that is under way brings it back when it ends."""

    def keep_response(self, tenant: str, response_id: str, kept: Kept) -> None:
        """Remember where a response is. Waits for nothing."""

    async def response(self, tenant: str, response_id: str) -> Kept | None:
        """Where a response of this tenant is; None if it is not known."""


class Clock:
    """Seconds since 1970 that never go back: the wall clock as it stood at start, and monotonic time from then on."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Now."""
        return time.monotonic() + self._offset_s
