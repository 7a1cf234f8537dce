"""What the router knows about each engine: is it up, how busy is it, where is its retention index."""

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
        draining: It is being emptied: what it holds may be read, and no new leg goes there.
    """

    url: EngineUrl
    role: Role
    healthy: bool
    in_flight: int = 0
    indexes: tuple[IndexInfo, ...] = ()
    draining: bool = False

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


class EngineTable:
    """Health and load of all engines. Probes and legs report events; policy reads snapshots."""

    def __init__(self, engines: Iterable[tuple[EngineUrl, Role]], *, probe_failures: int) -> None:
        self._engines = {(url, role): _Engine(role) for url, role in engines}
        self._probe_failures = probe_failures

    def snapshots(self, role: Role) -> tuple[EngineSnapshot, ...]:
        """All engines of one role, in configured order. Changes nothing."""
        return tuple(
            EngineSnapshot(url, role, engine.healthy, engine.in_flight, engine.indexes, engine.draining)
            for (url, engine_role), engine in self._engines.items()
            if engine_role is role
        )

    def probe_passed(self, url: EngineUrl, role: Role, indexes: tuple[IndexInfo, ...] | None) -> bool:
        """Note that an engine answered; `indexes` None means "not looked up". True if it was down before."""
        engine = self._engines[url, role]
        came_up = not engine.healthy
        engine.healthy, engine.failures = True, 0
        if indexes is not None:
            engine.indexes = indexes
        return came_up

    def probe_failed(self, url: EngineUrl, role: Role) -> bool:
        """Note that a probe failed; enough in a row take the engine down. True if this one did."""
        engine = self._engines[url, role]
        engine.failures += 1
        if engine.failures < self._probe_failures:
            return False
        return self._take_down(engine)

    def connect_failed(self, url: EngineUrl, role: Role) -> bool:
        """Note that a leg could not even connect: the engine is down until a probe passes. True if it was up."""
        return self._take_down(self._engines[url, role])

    def drain(self, url: EngineUrl, *, draining: bool) -> tuple[EngineSnapshot, ...]:
        """Take an engine out of placement, or back into it, in every role; returns it as it is then, empty if unknown.

        It stays so over restarts of the engine: whoever drains it says when it is back.
        """
        for (known, _), engine in self._engines.items():
            if known == url:
                engine.draining = draining
        return tuple(found for role in Role for found in self.snapshots(role) if found.url == url)

    def leg_started(self, url: EngineUrl, role: Role) -> None:
        """Count a leg in."""
        self._engines[url, role].in_flight += 1

    def leg_ended(self, url: EngineUrl, role: Role) -> None:
        """Count a leg out."""
        self._engines[url, role].in_flight -= 1

    @staticmethod
    def _take_down(engine: _Engine) -> bool:
        """A down engine has no indexes: it may come back as another incarnation with nothing retained."""
        was_up, engine.healthy, engine.indexes = engine.healthy, False, ()
        return was_up
