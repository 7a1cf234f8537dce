"""The door for turns: open while the router serves, with a bounded queue in front of it that tenants share."""

from __future__ import annotations

import asyncio
import contextlib
from enum import StrEnum
from typing import TYPE_CHECKING

from bidikv_server.router.core.admission import Admission, QueueFull
from bidikv_server.router.errors import RouterFault, ShuttingDown, TooManyTurns

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from bidikv_server.router.core.admission import Ticket
    from bidikv_server.router.metrics import RouterMetrics


class Phase(StrEnum):
    """Where the router is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


class TurnQueue:
    """Lets turns run, wait or go away. One event loop only.

    Attributes:
        phase: Turns are let in while it is `serving`.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        *,
        max_in_flight: int | None,
        max_queue: int,
        max_in_flight_per_tenant: int | None = None,
    ) -> None:
        self._metrics = metrics
        self._admission = Admission(
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            max_in_flight_per_tenant=max_in_flight_per_tenant,
        )
        self._turns_up: dict[Ticket, asyncio.Future[None]] = {}
        self._displaced: set[Ticket] = set()
        self.phase = Phase.STARTING

    @property
    def running(self) -> int:
        """Turns that run now."""
        return len(self._admission.running)

    @property
    def waiting(self) -> int:
        """Turns that wait for one of them to end."""
        return self._admission.waiting

    def open(self) -> None:
        """Let turns in from now on."""
        self.phase = Phase.SERVING

    def close(self) -> None:
        """Refuse new turns and those that wait; running ones go on."""
        self.phase = Phase.STOPPING
        for turn_up in self._turns_up.values():
            if not turn_up.done():
                turn_up.set_exception(self._refused(ShuttingDown()))

    def check(self, tenant: str = "") -> None:
        """Refuse a tenant's turn that has no chance, before its body is read.

        Raises:
            TooManyTurns: No room to run or to wait.
            ShuttingDown: The router stops, or has not started yet.
        """
        self._check_phase()
        if self._admission.full(tenant):
            raise self._refused(TooManyTurns())

    @contextlib.asynccontextmanager
    async def place(self, tenant: str = "") -> AsyncGenerator[None]:
        """Hold a turn's place while it runs, after a wait for it if need be; whoever is cancelled leaves the queue.

        Raises:
            TooManyTurns: No room to run or to wait, or none any more: a tenant that holds less came.
            ShuttingDown: The router stops.
        """
        self._check_phase()
        try:
            ticket, displaced = self._admission.enter(tenant)
        except QueueFull:
            raise self._refused(TooManyTurns()) from None
        if displaced is not None:
            self._refuse(displaced, TooManyTurns())
        try:
            if ticket not in self._admission.running:
                await self._wait(ticket)
            yield
        finally:
            if ticket not in self._displaced:
                self._leave(ticket)
            self._displaced.discard(ticket)

    def _check_phase(self) -> None:
        if self.phase is not Phase.SERVING:
            raise self._refused(ShuttingDown())

    async def _wait(self, ticket: Ticket) -> None:
        turn_up = self._turns_up[ticket] = asyncio.get_running_loop().create_future()
        self._metrics.queued.set(self._admission.waiting)
        try:
            with self._metrics.queue_seconds.time():
                await turn_up
        finally:
            del self._turns_up[ticket]
            if turn_up.done() and not turn_up.cancelled():
                # Whoever is cancelled in the moment it is refused hears of the one only.
                turn_up.exception()

    def _leave(self, ticket: Ticket) -> None:
        """Pass the place on. If the next turn has just been cancelled, it passes it on in turn."""
        promoted = self._admission.leave(ticket)
        self._metrics.queued.set(self._admission.waiting)
        if promoted is not None and not self._turns_up[promoted].done():
            self._turns_up[promoted].set_result(None)

    def _refuse(self, ticket: Ticket, fault: RouterFault) -> None:
        """Send a waiting turn away whose place has been given to another."""
        self._displaced.add(ticket)
        turn_up = self._turns_up[ticket]
        if not turn_up.done():
            turn_up.set_exception(self._refused(fault))

    def _refused(self, fault: RouterFault) -> RouterFault:
        self._metrics.refused.labels(fault.code).inc()
        return fault
