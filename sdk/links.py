"""The routers that hold a conversation, and what its client tells them between turns. Never raises."""

from __future__ import annotations

import asyncio
import logging
from threading import Lock
from typing import Any, Final

import openai

log = logging.getLogger(__name__)

PATH: Final = "/bidikv/conversations/"
"""Below the client's base URL: where a router answers for its callers' own conversations."""
_OPTIONS: Final[Any] = {"max_retries": 0, "timeout": 3.0}
"""These calls save a recompute at best, so they wait for nobody longer than a router waits for its engines."""


class Links:
    """Clients by the key under which the router behind each knows the conversation. Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._clients: dict[str, Any] = {}

    def add(self, key: str, client: Any) -> None:
        """A router answered a turn of the conversation through this client."""
        if self._clients.get(key) is not client:
            with self._lock:
                self._clients[key] = client

    def release(self) -> None:
        """Tell them that the conversation has ended."""
        for key, client in self._known():
            if isinstance(client, openai.AsyncOpenAI):
                log.warning(
                    "a conversation of an asynchronous client is ended by `await conversation.aclose()`"
                )
            else:
                self._forget(key)
                release(client, key)

    async def arelease(self) -> None:
        """Tell them that the conversation has ended, from a coroutine."""
        for key, client in self._known():
            self._forget(key)
            if isinstance(client, openai.AsyncOpenAI):
                await arelease(client, key)
            else:
                await asyncio.to_thread(release, client, key)

    def expect(self, wait_s: float) -> None:
        """Tell them that the next turn takes so many seconds to come."""
        for key, client in self._known():
            # Of an asynchronous client's conversation, what the last turn said of its tools has to do.
            if not isinstance(client, openai.AsyncOpenAI):
                _expect(client, key, wait_s)

    async def aexpect(self, wait_s: float) -> None:
        """Tell them that the next turn takes so many seconds to come, from a coroutine."""
        for key, client in self._known():
            if not isinstance(client, openai.AsyncOpenAI):
                await asyncio.to_thread(_expect, client, key, wait_s)
                continue
            try:
                await client.post(_wait(key), cast_to=object, body={"wait_s": wait_s}, options=_OPTIONS)
            except (openai.OpenAIError, RuntimeError) as error:
                _not_told(error)

    def _known(self) -> list[tuple[str, Any]]:
        with self._lock:
            return list(self._clients.items())

    def _forget(self, key: str) -> None:
        with self._lock:
            self._clients.pop(key, None)


def release(client: openai.OpenAI, key: str) -> None:
    """Tell one router that a conversation has ended."""
    try:
        client.delete(PATH + key, cast_to=object, options=_OPTIONS)
    except (openai.OpenAIError, RuntimeError) as error:
        _not_told(error)


async def arelease(client: openai.AsyncOpenAI, key: str) -> None:
    """Tell one router that a conversation has ended, from a coroutine."""
    try:
        await client.delete(PATH + key, cast_to=object, options=_OPTIONS)
    except (openai.OpenAIError, RuntimeError) as error:
        _not_told(error)


def _expect(client: openai.OpenAI, key: str, wait_s: float) -> None:
    try:
        client.post(_wait(key), cast_to=object, body={"wait_s": wait_s}, options=_OPTIONS)
    except (openai.OpenAIError, RuntimeError) as error:
        _not_told(error)


def _wait(key: str) -> str:
    return f"{PATH}{key}/wait"


def _not_told(error: Exception) -> None:
    # A RuntimeError is a client that has been closed.
    log.debug("the router was not told about a conversation: %s", error)
