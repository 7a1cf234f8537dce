"""The only user of redis-py: runs scripts on a Redis or Valkey server, within a time, and maps its errors once."""

from __future__ import annotations

import asyncio
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_CONNECTIONS: Final = 64
_CHECK_S: Final = 2.0
"""For a look whether the server is there: no turn waits for it."""
_FORMAT: Final = "1"
"""Part of every key's prefix: routers that write another format do not see each other's keys."""


class StateUnavailable(Exception):  # noqa: N818
    """The server did not do what it was asked; the message says why."""


class Script:
    """A script by its digest; the server is sent the text only when it does not know it."""

    def __init__(self, name: str) -> None:
        folder = resources.files(__package__)
        parts = [folder.joinpath(part).read_text("utf-8") for part in ("common.lua", f"{name}.lua")]
        self.text = "\n".join(parts)
        # The name that the server gives it, no matter of security.
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class StateServer:
    """One server. A script ends within `timeout_s`, or has failed."""

    def __init__(self, url: str, *, password: str | None, prefix: str, timeout_s: float) -> None:
        self.address = _address(url)
        self.prefix = f"{prefix}:{_FORMAT}:".encode()
        self._timeout_s = timeout_s
        secret = {"password": password} if password is not None else {}
        self._client = Redis.from_pool(
            BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=timeout_s,
                protocol=2,
                socket_timeout=None,
                socket_connect_timeout=None,
                # Once, for a connection that the server has closed while it was idle.
                retry=Retry(NoBackoff(), 1, (exceptions.ConnectionError,)),
                **secret,
            )
        )

    async def run(self, script: Script, *arguments: bytes | str | float) -> Any:
        """Run a script; its answer.

        Raises:
            StateUnavailable: There is no answer.
        """
        return await self._within(self._run(script, arguments))

    async def check(self) -> None:
        """Whether the server takes writes.

        Raises:
            StateUnavailable: It does not.
        """
        await self._within(self._client.set(self.prefix + b"up", b"", px=1000), longest_s=_CHECK_S)

    async def disconnect(self) -> None:
        """Close all connections; the next call opens one anew, also to where the name leads then."""
        await self._client.connection_pool.disconnect()

    async def close(self) -> None:
        """Close everything."""
        await self._client.aclose()

    async def _run(self, script: Script, arguments: Sequence[bytes | str | float]) -> Any:
        try:
            return await self._client.evalsha(script.digest, 0, self.prefix, *arguments)
        except exceptions.NoScriptError:
            return await self._client.eval(script.text, 0, self.prefix, *arguments)

    async def _within(self, work: Any, longest_s: float | None = None) -> Any:
        longest_s = longest_s or self._timeout_s
        try:
            async with asyncio.timeout(longest_s):
                return await work
        except TimeoutError:
            raise StateUnavailable(f"no answer within {longest_s:g} s") from None
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise StateUnavailable(
                f"{error}: check user and password (state_url, state_password) and what the user may do"
            ) from error
        except (exceptions.RedisError, OSError, EOFError, ValueError) as error:
            # The last two: what answers does not speak the protocol.
            raise StateUnavailable(str(error) or type(error).__name__) from error


def _address(url: str) -> str:
    """The server without user, password and options, for logs."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or 6379}{parts.path}"
