"""Conversations: their ids on the wire, their nesting, and the one that is current (standard library only)."""

from __future__ import annotations

import base64
import hashlib
import math
import secrets
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, TypeAlias
from uuid import UUID

from bidikv.errors import ConfigurationError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from bidikv.reuse import TurnReport

Key: TypeAlias = "str | int | bytes | UUID | tuple[Key, ...]"
Kind: TypeAlias = Literal["main", "tool", "aux", "compaction"]

_DEFAULT_SECRET: Final = b"bidikv conversation id"
_DIGEST_BYTES: Final = 16  # 128 bits are 26 characters of base32

# A tuple per context, replaced and never changed: tasks and threads that copied a context cannot disturb it.
_entered: ContextVar[tuple[Conversation, ...]] = ContextVar("bidikv_conversations", default=())


def session_id(*parts: Key, secret: bytes | None = None) -> str:
    """The wire id that belongs to these parts: `c_` and 26 characters, the same in every process.

    Args:
        parts: What the caller calls the conversation. They do not appear on the wire.
        secret: Keys the hash (64 bytes at most), so that someone who sees ids cannot try out names.

    Raises:
        ConfigurationError: A part has a type without one stable spelling, or the secret is too long.
    """
    try:
        digest = hashlib.blake2b(
            _encode(parts), key=secret or _DEFAULT_SECRET, digest_size=_DIGEST_BYTES
        ).digest()
    except ValueError as error:
        raise ConfigurationError(f"cannot derive a conversation id: {error}") from error
    return _wire_id(digest)


def _encode(part: Key) -> bytes:
    """Spell a part so that no two different parts are spelt alike."""
    if isinstance(part, tuple):
        tag, body = b"t", b"".join(_encode(member) for member in part)
    elif isinstance(part, str):
        tag, body = b"s", part.encode("utf-8", "surrogatepass")
    elif isinstance(part, bytes):
        tag, body = b"b", part
    elif isinstance(part, UUID):
        tag, body = b"u", part.bytes
    elif isinstance(part, int):
        tag, body = b"i", str(int(part)).encode()
    else:
        raise ConfigurationError(
            f"a conversation key is text, a number, bytes or a UUID, not {type(part).__name__}"
        )
    return b"%b%d:%b" % (tag, len(body), body)


def _wire_id(digest: bytes) -> str:
    return "c_" + base64.b32encode(digest).decode().rstrip("=").lower()


class Conversation(AbstractContextManager["Conversation"], AbstractAsyncContextManager["Conversation"]):
    """A sequence of turns whose prompts extend each other. Entering it makes it current for this task or thread.

    Calls made while it is current, from whatever depth, belong to it. It may be entered often and by many tasks at
    once. `asyncio` tasks and `asyncio.to_thread` inherit the current conversation; bare threads start with none.

    Attributes:
        id: Wire id, a hash of the key.
        parent: Wire id of the conversation that this one was forked from.
        agent: Short label for the router's logs.
        kind: What its calls are; `aux` calls are neither retained nor do they disturb.
        retain_s: Seconds within which the next turn is expected; 0 asks decode to keep nothing.
        turns: A report for each call that was answered, in order of the answers.
    """

    def __init__(
        self,
        key: Key | None = None,
        *,
        agent: str | None = None,
        parent: str | None = None,
        kind: Kind = "main",
        retain_s: float | None = None,
        secret: bytes | None = None,
    ) -> None:
        if retain_s is not None and not 0 <= retain_s < math.inf:
            raise ConfigurationError(f"retain_s is a number of seconds, not {retain_s}")
        self.id = (
            _wire_id(secrets.token_bytes(_DIGEST_BYTES)) if key is None else session_id(key, secret=secret)
        )
        self.parent = parent
        self.agent = agent
        self.kind: Kind = kind
        self.retain_s = retain_s
        self.turns: list[TurnReport] = []
        self._secret = secret
        self._calls = count()

    def child(
        self, agent: str, *, key: Key = "", kind: Kind | None = None, retain_s: float | None = None
    ) -> Conversation:
        """A conversation of another agent that works for this one; the same for the same agent and key."""
        return Conversation(
            (self.id, agent, key),
            agent=agent,
            parent=self.id,
            kind=kind or self.kind,
            retain_s=retain_s,
            secret=self._secret,
        )

    def next_index(self) -> int:
        """Count a call, and return how many were counted before. Advisory: calls may overlap."""
        return next(self._calls)

    def __enter__(self) -> Self:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not a token: an exit may run in another context than the enter did (generators, async fixtures).
        entered = _entered.get()
        for position in range(len(entered) - 1, -1, -1):
            if entered[position] is self:
                _entered.set(entered[:position] + entered[position + 1 :])
                return

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"Conversation({self.id}, turns={len(self.turns)})"


def conversation(
    key: Key | None = None,
    *,
    agent: str | None = None,
    retain_s: float | None = None,
    secret: bytes | None = None,
) -> Conversation:
    """Name a conversation: `with bidikv.conversation("ticket-17"): ...`.

    Args:
        key: The same key is the same conversation, in every process; without one, a new one each time.
        agent: Short label for the router's logs.
        retain_s: Seconds within which the next turn is expected; 0 asks decode to keep nothing.
        secret: See `session_id`.

    Raises:
        ConfigurationError: See `session_id`; or `retain_s` is no duration.
    """
    return Conversation(key, agent=agent, retain_s=retain_s, secret=secret)


def current_conversation() -> Conversation | None:
    """The innermost conversation entered by this task or thread."""
    entered = _entered.get()
    return entered[-1] if entered else None
