"""Kills members of a cluster while turns are played, and starts them again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from bidikv_server.verify.results import Outage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LONGEST_DELAY_S: Final = 1.5
"""Long enough to hit prefill and decode legs alike."""
_TURNS_PER_KILL: Final = 5
_TURNS_WITHOUT: Final = 2
"""So many turns begin while a member is down. An engine takes as long to start as many turns without it: they would be
most of the run, and none would find anything to reuse."""


class Members(Protocol):
    """What can be killed: a `Cluster`."""

    def members(self) -> list[str]:
        """Names of all members."""

    def kill(self, name: str) -> None:
        """End a member at once."""

    def restart(self, name: str) -> None:
        """Start it again, and wait until it is used."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One disturbance.

    Attributes:
        turn: How many turns have begun before it.
        member: Who goes.
        delay_s: How far into that turn; 0 is between two turns.
    """

    turn: int
    member: str
    delay_s: float


def plan_kills(seed: int, turns: int, members: Sequence[str]) -> list[Kill]:
    """One kill every few turns, so that every kind of member goes before one goes twice. Decided by the seed."""
    rng = Random(f"chaos/{seed}")  # noqa: S311  (reproducible, not secret)
    order: list[str] = []
    kills = []
    for turn in range(3, turns + 1, _TURNS_PER_KILL):
        if not order:
            order = rng.sample(list(members), len(members))
        delay_s = 0.0 if rng.random() < 0.25 else round(rng.uniform(0.02, _LONGEST_DELAY_S), 3)
        kills.append(Kill(turn, order.pop(), delay_s))
    return kills


@dataclass(slots=True)
class Chaos:
    """Carries out a plan of kills, one after the other.

    Attributes:
        cluster: Whose members are killed.
        kills: The plan.
        say: For progress.
        outages: What was done.
    """

    cluster: Members
    kills: list[Kill]
    say: Callable[[str], None]
    outages: list[Outage] = field(default_factory=list)
    _begun: int = 0
    _down: bool = False
    _begun_without: int = 0
    _last_up_s: float = float("-inf")
    _turn: asyncio.Event = field(default_factory=asyncio.Event)
    _back: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn_begins(self) -> None:
        """Count a turn; it waits if enough have begun without the member that is down."""
        while self._down and self._begun_without >= _TURNS_WITHOUT:
            await self._back.wait()
        self._begun += 1
        self._begun_without += self._down
        self._turn.set()

    def excuses(self, started_s: float) -> bool:
        """Whether something was down at some time since then."""
        return self._down or self._last_up_s >= started_s

    async def work(self) -> None:
        """Kill by the plan until `finish` was called; a member that is down then is waited for.

        Raises:
            LaunchError: A member does not start again.
        """
        while self.kills:
            kill = self.kills[0]
            if self._begun < kill.turn:
                self._turn.clear()
                await self._turn.wait()
                continue
            self.kills = self.kills[1:]
            await asyncio.sleep(kill.delay_s)
            await self._carry_out(kill)

    def finish(self) -> None:
        """All turns are played: kills that no turn reached are left out."""
        self.kills = []
        self._turn.set()

    async def _carry_out(self, kill: Kill) -> None:
        self.say(f"chaos: killing {kill.member}")
        started_s, begun = time.monotonic(), self._begun
        self._down, self._begun_without = True, 0
        self._back.clear()
        await asyncio.to_thread(self.cluster.kill, kill.member)
        await asyncio.to_thread(self.cluster.restart, kill.member)
        self._last_up_s = time.monotonic()
        self._down = False
        self._back.set()
        seconds = self._last_up_s - started_s
        self.outages.append(Outage(member=kill.member, before_turn=begun, seconds=round(seconds, 1)))
        self.say(f"chaos: {kill.member} is back after {seconds:.0f} s")
