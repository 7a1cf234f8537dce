"""What a router does while the shared state is down: nothing at once, and every so often a look whether it is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bidikv_server.router.state.connection import StateUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bidikv_server.router.state.connection import Script, StateServer
    from bidikv_server.router.state.metrics import StateMetrics

_log = logging.getLogger(__name__)

_FIRST_LOOK_S: Final = 0.5
_LONGEST_WAIT_S: Final = 5.0
_CALM_S: Final = 30.0
"""Up for so long, the next outage is looked at as the first one was."""
_MAX_PENDING: Final = 10_000


class Write(NamedTuple):
    """A call that changes the shared state."""

    name: str
    script: Script
    arguments: tuple[bytes | str | float, ...]


class Circuit:
    """Calls to a server that may be away.

    The first call that fails opens the circuit: until a look finds the server well, no call is made. Writes are kept
    meanwhile, the last ten thousand, and made up for before anything else is done.
    """

    def __init__(
        self,
        server: StateServer,
        metrics: StateMetrics,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._server = server
        self._metrics = metrics
        self._sleep = sleep
        self._pending: deque[Write] = deque(maxlen=_MAX_PENDING)
        self._looking: asyncio.Task[None] | None = None
        self._wait_s = _FIRST_LOOK_S
        self._since_s = time.monotonic()
        self.up = False

    async def open(self) -> None:
        """Look for the first time."""
        try:
            await self._server.check()
        except StateUnavailable as error:
            self._fail(error)
        else:
            self._close_circuit()

    async def close(self) -> None:
        """Stop looking."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await self._server.close()

    async def read(self, name: str, script: Script, *arguments: bytes | str | float) -> Any:
        """Run a script that changes nothing; its answer, None without one."""
        if not self.up:
            self._metrics.skipped.labels(name).inc()
            return None
        try:
            return await self._timed(Write(name, script, arguments))
        except StateUnavailable as error:
            self._fail(error)
            return None

    async def write(self, write: Write) -> Any:
        """Run a script that changes something; its answer, None if it will be made up for."""
        if not self.up:
            self._metrics.skipped.labels(write.name).inc()
            self._keep(write)
            return None
        try:
            return await self._timed(write)
        except StateUnavailable as error:
            self._keep(write)
            self._fail(error)
            return None

    async def _timed(self, call: Write) -> Any:
        started_s, outcome = time.monotonic(), "cancelled"
        try:
            answer = await self._server.run(call.script, *call.arguments)
            outcome = "ok"
        except StateUnavailable:
            outcome = "failed"
            raise
        finally:
            self._metrics.seconds.labels(call.name, outcome).observe(time.monotonic() - started_s)
        return answer

    def _keep(self, write: Write) -> None:
        if len(self._pending) == _MAX_PENDING:
            self._metrics.lost.inc()
        self._pending.append(write)

    def _fail(self, error: StateUnavailable) -> None:
        """Note a failure; the first one of an outage is told, and begins the looking."""
        if self._looking is not None:
            return
        now_s = time.monotonic()
        if self.up and now_s - self._since_s > _CALM_S:
            self._wait_s = _FIRST_LOOK_S
        self.up, self._since_s = False, now_s
        self._metrics.up.set(0)
        _log.warning(
            "the shared state at %s is down: %s. This router goes on with its own memory",
            self._server.address,
            error,
        )
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        cause = ""
        while True:
            await self._sleep(self._wait_s * random.uniform(0.8, 1.2))  # noqa: S311  (so that routers do not look in step)
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
            try:
                await self._server.disconnect()
                await self._server.check()
                made_up = await self._make_up()
            except StateUnavailable as error:
                if str(error) != cause:
                    cause = str(error)
                    _log.info("the shared state at %s is still down: %s", self._server.address, error)
                continue
            _log.info(
                "the shared state at %s is back after %.1f s; %d turns and releases were written back",
                self._server.address,
                time.monotonic() - self._since_s,
                made_up,
            )
            self._looking = None
            self._close_circuit()
            return

    async def _make_up(self) -> int:
        """Write what was kept, oldest first, and what comes meanwhile.

        Raises:
            StateUnavailable: The server is away again; what is not written is still kept.
        """
        made_up = 0
        while self._pending:
            write = self._pending.popleft()
            try:
                await self._timed(write)
            except StateUnavailable:
                if len(self._pending) < _MAX_PENDING:
                    self._pending.appendleft(write)
                raise
            made_up += 1
            self._metrics.written_back.inc()
        return made_up

    def _close_circuit(self) -> None:
        self.up, self._since_s = True, time.monotonic()
        self._metrics.up.set(1)
