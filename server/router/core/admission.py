"""How many turns may run at once and how many may wait, fairly among tenants.

The tenant with fewest turns running is next, among equals the one whose last turn began longest ago; of one tenant the turn
that has waited longest. A full queue is shared as well: a
tenant that holds less of the router than another takes the place of that one's newest waiting turn.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NewType

Ticket = NewType("Ticket", int)
"""One turn's place; valid until it leaves. Later turns have greater ones."""


_REMEMBERED: Final = 1024
"""Tenants whose last turn's beginning is remembered while they have none."""


class QueueFull(Exception):  # noqa: N818
    """As many turns run and wait as may."""


@dataclass(slots=True)
class _Tenant:
    name: str
    running: int = 0
    waiting: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)

    @property
    def held(self) -> int:
        return self.running + len(self.waiting)


class Admission:
    """Counts turns in and out.

    Attributes:
        running: Turns that may run now.
    """

    def __init__(
        self, *, max_in_flight: int | None, max_queue: int, max_in_flight_per_tenant: int | None = None
    ) -> None:
        """Bound the turns.

        Args:
            max_in_flight: Turns that run at once; None for as many as come.
            max_queue: Turns that wait.
            max_in_flight_per_tenant: Turns of one tenant that run at once; None for as many as come.
        """
        self._max_in_flight = max_in_flight
        self._max_per_tenant = max_in_flight_per_tenant
        self._max_queue = max_queue
        self._numbers = itertools.count()
        self._tenants: dict[str, _Tenant] = {}
        self._of: dict[Ticket, str] = {}
        self._began: OrderedDict[str, int] = OrderedDict()
        self.running: set[Ticket] = set()

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return len(self._of) - len(self.running)

    def full(self, tenant: str = "") -> bool:
        """Whether this tenant's next turn would be refused."""
        held = self._tenants.get(tenant) or _Tenant(tenant)
        return not self._may_run(held) and self.waiting >= self._max_queue and self._greediest(held) is None

    def enter(self, tenant: str = "") -> tuple[Ticket, Ticket | None]:
        """Let a turn in: it runs if its ticket is in `running`, else it waits.

        Returns:
            Its ticket, and that of the turn which had to leave the queue for it, if one had to.

        Raises:
            QueueFull: It may neither run nor wait.
        """
        if self.full(tenant):
            raise QueueFull
        held = self._tenants.setdefault(tenant, _Tenant(tenant))
        displaced = None
        if not self._may_run(held) and self.waiting >= self._max_queue:
            greediest = self._greediest(held)
            if greediest is not None:
                displaced = next(reversed(greediest.waiting))
                del greediest.waiting[displaced], self._of[displaced]
        ticket = Ticket(next(self._numbers))
        self._of[ticket] = tenant
        if self._may_run(held):
            self._run(held, ticket)
        else:
            held.waiting[ticket] = None
        return ticket, displaced

    def leave(self, ticket: Ticket) -> Ticket | None:
        """Let a turn go, whether it ran or waited. Returns the turn that runs in its place, if one waited for it."""
        tenant = self._of.pop(ticket)
        held = self._tenants[tenant]
        if ticket in held.waiting:
            del held.waiting[ticket]
        else:
            held.running -= 1
            self.running.remove(ticket)
        if not held.held:
            del self._tenants[tenant]
        return self._promote()

    def _promote(self) -> Ticket | None:
        if not self.waiting:
            return None
        able = [held for held in self._tenants.values() if held.waiting and self._may_run(held)]
        if not able:
            return None
        held = min(
            able, key=lambda held: (held.running, self._began.get(held.name, -1), next(iter(held.waiting)))
        )
        ticket, _ = held.waiting.popitem(last=False)
        self._run(held, ticket)
        return ticket

    def _run(self, held: _Tenant, ticket: Ticket) -> None:
        held.running += 1
        self.running.add(ticket)
        self._began[held.name] = next(self._numbers)
        self._began.move_to_end(held.name)
        if len(self._began) > _REMEMBERED:
            self._began.popitem(last=False)

    def _may_run(self, held: _Tenant) -> bool:
        if self._max_per_tenant is not None and held.running >= self._max_per_tenant:
            return False
        return self._max_in_flight is None or len(self.running) < self._max_in_flight

    def _greediest(self, than: _Tenant) -> _Tenant | None:
        """The tenant that holds most of those that wait, if it would still hold no less than this one after giving way."""
        able = [held for held in self._tenants.values() if held.waiting and held.held > than.held + 1]
        return max(able, key=lambda held: (held.held, next(reversed(held.waiting))), default=None)
