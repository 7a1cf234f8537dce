"""What the router knows about each engine: is it listed, is it up, how busy is it, where is its retention index.

Engines come and go. One that is taken off the list is leaving: it finishes its legs and may still be read back from, and
no new leg goes there. It is forgotten when nothing of it is of use any more: no leg runs, and it is down, or has answered
for as long as decode retains a turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bidikv_server.router.core.ids import EngineUrl


class Role(StrEnum):
    """Which half of a turn an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, order=True)
class IndexInfo:
    """One retention index, as a decode engine publishes it (one per data-parallel rank).

    Attributes:
        engine_id: New with every start of the engine.
        address: `host:port` for prefill engines to ask; opaque here.
    """

    engine_id: str
    address: str


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One engine at one moment.

    Attributes:
        url: Base URL.
        role: Half of the turn it serves.
        healthy: It answers.
        in_flight: Legs of this router that run on it.
        indexes: Its retention indexes; empty for a stock engine or before they are learned.
        draining: It is being emptied, on an operator's word or because it is leaving: what it holds may be read, and no
            new leg goes there.
        leaving: It was taken off the list of engines.
    """

    url: EngineUrl
    role: Role
    healthy: bool
    in_flight: int = 0
    indexes: tuple[IndexInfo, ...] = ()
    draining: bool = False
    leaving: bool = False

    @property
    def takes_legs(self) -> bool:
        """A new leg may go there."""
        return self.healthy and not self.draining


@dataclass(slots=True)
class _Engine:
    role: Role
    healthy: bool = False
    failures: int = 0
    in_flight: int = 0
    indexes: tuple[IndexInfo, ...] = field(default=())
    draining: bool = False
    leaving: bool = False
    idle_since_s: float | None = None


class EngineTable:
    """Health and load of all engines. Discovery, probes and legs report events; policy reads snapshots.

    Events about an engine that is not known (any more) change nothing: a probe may outlive its engine.
    """

    def __init__(
        self, engines: Iterable[tuple[EngineUrl, Role]], *, probe_failures: int, linger_s: float = 0.0
    ) -> None:
        """Begin with these engines, all down.

        Args:
            engines: URL and role of each; an engine may have both roles.
            probe_failures: Probes that must fail in a row to take an engine down.
            linger_s: How long a leaving decode engine that answers may still be read back from after its last leg.
        """
        self._engines = {(url, role): _Engine(role) for url, role in engines}
        self._probe_failures = probe_failures
        self._linger_s = linger_s

    def snapshots(self, role: Role) -> tuple[EngineSnapshot, ...]:
        """All engines of one role, in the order in which they were listed. Changes nothing."""
        return tuple(
            EngineSnapshot(
                url,
                role,
                engine.healthy,
                engine.in_flight,
                engine.indexes,
                engine.draining or engine.leaving,
                engine.leaving,
            )
            for (url, engine_role), engine in self._engines.items()
            if engine_role is role
        )

    def add(self, url: EngineUrl, role: Role) -> bool:
        """List an engine; one that is leaving comes back as it is. True if it was not listed."""
        engine = self._engines.get((url, role))
        if engine is None:
            self._engines[url, role] = _Engine(role)
            return True
        was_leaving, engine.leaving, engine.idle_since_s = engine.leaving, False, None
        return was_leaving

    def remove(self, url: EngineUrl, role: Role) -> bool:
        """Take an engine off the list. True if it was on it."""
        engine = self._engines.get((url, role))
        if engine is None or engine.leaving:
            return False
        engine.leaving = True
        return True

    def sweep(self, now_s: float) -> tuple[tuple[EngineUrl, Role], ...]:
        """Forget the leaving engines that nothing is left of; returns them."""
        gone = tuple(known for known, engine in self._engines.items() if self._is_gone(engine, now_s))
        for known in gone:
            del self._engines[known]
        return gone

    def probe_passed(self, url: EngineUrl, role: Role, indexes: tuple[IndexInfo, ...] | None) -> bool:
        """Note that an engine answered; `indexes` None means "not looked up". True if it was down before."""
        engine = self._engines.get((url, role))
        if engine is None:
            return False
        came_up = not engine.healthy
        engine.healthy, engine.failures = True, 0
        if indexes is not None:
            engine.indexes = indexes
        return came_up

    def probe_failed(self, url: EngineUrl, role: Role) -> bool:
        """Note that a probe failed; enough in a row take the engine down. True if it counts as down with this one.

        Of an engine that was never up it is told once, too: whoever mistyped its address wants to hear of it.
        """
        engine = self._engines.get((url, role))
        if engine is None:
            return False
        engine.failures += 1
        if engine.failures >= self._probe_failures:
            self._take_down(engine)
        return engine.failures == self._probe_failures

    def connect_failed(self, url: EngineUrl, role: Role) -> bool:
        """Note that a leg could not even connect: the engine is down until a probe passes. True if it was up."""
        engine = self._engines.get((url, role))
        if engine is None:
            return False
        engine.failures = max(engine.failures, self._probe_failures)
        return self._take_down(engine)

    def drain(self, url: EngineUrl, *, draining: bool) -> tuple[EngineSnapshot, ...]:
        """Take an engine out of placement, or back into it, in every role; returns it as it is then, empty if unknown.

        It stays so over restarts of the engine: whoever drains it says when it is back.
        """
        for (known, _), engine in self._engines.items():
            if known == url:
                engine.draining = draining
        return tuple(found for role in Role for found in self.snapshots(role) if found.url == url)

    def leg_started(self, url: EngineUrl, role: Role) -> None:
        """Count a leg in. One that begins after its engine was forgotten holds a place for it again, as leaving."""
        engine = self._engines.setdefault((url, role), _Engine(role, leaving=True))
        engine.in_flight += 1

    def leg_ended(self, url: EngineUrl, role: Role) -> None:
        """Count a leg out."""
        self._engines[url, role].in_flight -= 1

    def _is_gone(self, engine: _Engine, now_s: float) -> bool:
        """Whether nothing is left of a leaving engine; its rest begins with the first sweep that finds it idle."""
        if not engine.leaving:
            return False
        if engine.in_flight:
            engine.idle_since_s = None
            return False
        if engine.idle_since_s is None:
            engine.idle_since_s = now_s
        rests = engine.role is Role.DECODE and engine.healthy and bool(engine.indexes)
        return not rests or now_s - engine.idle_since_s >= self._linger_s

    @staticmethod
    def _take_down(engine: _Engine) -> bool:
        """A down engine has no indexes: it may come back as another incarnation with nothing retained."""
        was_up, engine.healthy, engine.indexes = engine.healthy, False, ()
        return was_up
