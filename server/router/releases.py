"""Telling decode to forget a conversation, or to keep it: the router's use of the engines' side channel, if it can."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bidikv_server.connector.side_channel import Client
    from bidikv_server.router.core.ids import ConversationKey

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 2.0
_RENEW_TIMEOUT_S: Final = 0.5
"""A renewal is worth a recompute at best, and its caller's tool waits for it."""
_SILENT: Final = 1024
"""Remembered at most."""


class Outcome(StrEnum):
    """What became of telling one index."""

    RELEASED = "released"
    RENEWED = "renewed"
    NOT_HELD = "not_held"
    """It knew no such conversation."""
    NO_ANSWER = "no_answer"
    """It is gone, or does not share BIDIKV_SECRET with the router."""
    REFUSED = "refused"
    """It speaks another version."""
    NOT_TOLD = "not_told"
    """The router has no pyzmq or msgspec: it cannot speak to indexes."""


class Releaser:
    """Releases and renews conversations on decode engines. The side channel is opened with the first one."""

    def __init__(self, secret: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._secret = secret
        self._timeout_s = timeout_s
        self._client: Client | None = None
        self._silent: dict[str, None] = {}
        """Addresses that did not answer when they were last told something."""

    async def release(self, addresses: Iterable[str], key: ConversationKey) -> dict[str, Outcome]:
        """Tell these indexes that a conversation has ended; what each one said, within two seconds."""
        return await self._tell(
            addresses, lambda m: m.Release(m.VERSION, key), Outcome.RELEASED, self._timeout_s
        )

    async def renew(self, addresses: Iterable[str], key: ConversationKey, ttl_s: float) -> dict[str, Outcome]:
        """Tell these indexes that a conversation comes back within so many seconds; what each one said, within half a second."""
        timeout_s = min(self._timeout_s, _RENEW_TIMEOUT_S)
        return await self._tell(
            addresses, lambda m: m.Renew(m.VERSION, key, ttl_s), Outcome.RENEWED, timeout_s
        )

    async def _tell(
        self, addresses: Iterable[str], message: Callable[[Any], Any], done: Outcome, timeout_s: float
    ) -> dict[str, Outcome]:
        """Send what `message` makes of the message types to each index."""
        asked = tuple(dict.fromkeys(addresses))
        if not asked:
            return {}
        try:
            # The router runs without the connector's packages too.
            from bidikv_server.connector import messages, side_channel  # noqa: PLC0415
        except ImportError:
            return dict.fromkeys(asked, Outcome.NOT_TOLD)
        if self._client is None:
            self._client = side_channel.Client(secret=self._secret)
        request = messages.encode(message(messages))
        answers = asyncio.gather(
            *(
                asyncio.wrap_future(self._client.submit(address, request, timeout_s=timeout_s))
                for address in asked
            ),
            return_exceptions=True,
        )
        # Shielded: the side channel's thread takes no cancelled future, and the message is on its way anyway.
        replies = await asyncio.shield(answers)
        outcomes = {address: _outcome(reply, done) for address, reply in zip(asked, replies, strict=True)}
        for address, outcome in outcomes.items():
            self._note(address, heard=outcome is not Outcome.NO_ANSWER)
        return outcomes

    def _note(self, address: str, *, heard: bool) -> None:
        """Say once of an index that nothing reaches it: its callers are not told, and lose memory and protection by it."""
        if heard:
            self._silent.pop(address, None)
        elif address not in self._silent:
            self._silent[address] = None
            if len(self._silent) > _SILENT:
                del self._silent[next(iter(self._silent))]
            _log.warning(
                "the index at %s does not answer: it is gone, or the router has another BIDIKV_SECRET than its engine. "
                "Conversations that are closed stay there until their time is up, and tools that run protect none",
                address,
            )

    async def close(self) -> None:
        """Close the side channel, if it was opened."""
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)


def _outcome(reply: Any, done: Outcome) -> Outcome:
    from bidikv_server.connector import messages  # noqa: PLC0415

    if isinstance(reply, OSError):  # TimeoutError is one
        return Outcome.NO_ANSWER
    if isinstance(reply, BaseException):
        raise reply
    answer = messages.decode(reply)
    if not isinstance(answer, messages.Verdict) or answer.v != messages.VERSION:
        return Outcome.REFUSED
    return done if answer.valid else Outcome.NOT_HELD
