"""What the router knows about each engine: is it listed, is it up, how busy is it, where is its retention index.

Engines come and go. One that is taken off the list is leaving: it finishes its legs and may still be read back from, and
no new leg goes there. It is forgotten when nothing of it is of use any more: no leg runs, and it is down, or has answered
for as long as decode retains a turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.circuit import Circuit, CircuitRule, CircuitState

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
class EngineLoad:
    """What an engine itself says of its load, and of what it can take off it.

    Attributes:
        running: Requests in its batch.
        waiting: Requests that it cannot run yet.
        kv_usage: Share of its KV blocks that running requests hold, from 0 to 1; None if it does not say.
        prefix_caching: It has a prefix cache of its own; None if it does not say.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    prefix_caching: bool | None = None


_IDLE: Final = EngineLoad()
_CAREFUL: Final = CircuitRule(failures=5, open_s=5.0)


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
        expected: Turns of this router that will come here once prefill has computed their prompt.
        others: Requests of somebody else's, when the engine was last asked.
        waiting: Requests that it could not run then.
        kv_usage: Share of its KV blocks that running requests held then; None if it does not say.
        backlog_tokens: Tokens that the legs in flight have to compute, as far as that was foreseen.
        circuit: Whether its last legs ended well.
        prefix_caching: It has a prefix cache of its own; None if it does not say.
    """

    url: EngineUrl
    role: Role
    healthy: bool
    in_flight: int = 0
    indexes: tuple[IndexInfo, ...] = ()
    draining: bool = False
    leaving: bool = False
    expected: int = 0
    others: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    backlog_tokens: int = 0
    circuit: CircuitState = CircuitState.CLOSED
    prefix_caching: bool | None = None

    @property
    def takes_legs(self) -> bool:
        """A new leg may go there."""
        return self.healthy and not self.draining

    @property
    def trusted(self) -> bool:
        """Its legs end well, or one of them may find out whether they do again."""
        if self.circuit is CircuitState.HALF_OPEN:
            return self.in_flight + self.expected == 0
        return self.circuit is CircuitState.CLOSED

    @property
    def load(self) -> int:
        """Requests that it has or is about to get."""
        return self.in_flight + self.expected + self.others


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
    expected: int = 0
    others: int = 0
    said: EngineLoad = _IDLE
    backlog_tokens: int = 0
    circuit: Circuit = field(default_factory=Circuit)
    seen: EngineSnapshot | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Whatever changes, the snapshot is no longer true. Every turn looks at every engine, and changes two of them."""
        object.__setattr__(self, name, value)
        if name != "seen":
            object.__setattr__(self, "seen", None)

    def snapshot(self, url: EngineUrl) -> EngineSnapshot:
        """As it is now."""
        if self.seen is None or self.seen.circuit is not self.circuit.state:
            self.seen = EngineSnapshot(
                url,
                self.role,
                self.healthy,
                self.in_flight,
                self.indexes,
                self.draining or self.leaving,
                self.leaving,
                self.expected,
                self.others,
                self.said.waiting,
                self.said.kv_usage,
                self.backlog_tokens,
                self.circuit.state,
                self.said.prefix_caching,
            )
        return self.seen


class EngineTable:
    """Health and load of all engines. Discovery, probes and legs report events; policy reads snapshots.

    Events about an engine that is not known (any more) change nothing: a probe may outlive its engine.
    """

    def __init__(
        self,
        engines: Iterable[tuple[EngineUrl, Role]],
        *,
        probe_failures: int,
        linger_s: float = 0.0,
        circuit: CircuitRule = _CAREFUL,
    ) -> None:
        """Begin with these engines, all down.

        Args:
            engines: URL and role of each; an engine may have both roles.
            probe_failures: Probes that must fail in a row to take an engine down.
            linger_s: How long a leaving decode engine that answers may still be read back from after its last leg.
            circuit: When legs that fail keep others away.
        """
        self._engines = {(url, role): _Engine(role) for url, role in engines}
        self._probe_failures = probe_failures
        self._linger_s = linger_s
        self._rule = circuit

    def snapshots(self, role: Role) -> tuple[EngineSnapshot, ...]:
        """All engines of one role, in the order in which they were listed. Changes nothing."""
        return tuple(
            engine.snapshot(url) for (url, _), engine in self._engines.items() if engine.role is role
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
        if came_up:
            # It may well be another process, and what its address did before says nothing.
            engine.circuit.reset()
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

    def load_said(self, url: EngineUrl, role: Role, load: EngineLoad) -> None:
        """Note what an engine says of its load; what is above this router's own legs is somebody else's."""
        engine = self._engines.get((url, role))
        if engine is not None:
            engine.said = load
            engine.others = max(0, load.running + load.waiting - engine.in_flight)

    def leg_started(self, url: EngineUrl, role: Role, tokens: int = 0) -> int:
        """Count a leg in that will compute about so many tokens; returns those that are ahead of it.

        One that begins after its engine was forgotten holds a place for it again, as leaving.
        """
        engine = self._held(url, role)
        engine.in_flight += 1
        ahead, engine.backlog_tokens = engine.backlog_tokens, engine.backlog_tokens + tokens
        return ahead

    def leg_ended(self, url: EngineUrl, role: Role, tokens: int = 0) -> None:
        """Count a leg out, with the tokens it was counted in with."""
        engine = self._engines[url, role]
        engine.in_flight -= 1
        engine.backlog_tokens -= tokens

    def turn_expected(self, url: EngineUrl, change: int) -> None:
        """Count turns that are on their way to a decode engine by way of prefill: 1 more, or -1."""
        self._held(url, Role.DECODE).expected += change

    def leg_succeeded(self, url: EngineUrl, role: Role) -> bool:
        """Note a leg that ended well; whether that closed the engine's circuit."""
        engine = self._engines.get((url, role))
        return engine is not None and engine.circuit.succeeded()

    def leg_failed(self, url: EngineUrl, role: Role, now_s: float) -> bool:
        """Note a leg that failed through the engine's own fault; whether that opened its circuit."""
        engine = self._engines.get((url, role))
        return engine is not None and engine.circuit.failed(self._rule, now_s)

    def advance(self, now_s: float) -> None:
        """Let circuits that have been open long enough try a leg."""
        for engine in self._engines.values():
            engine.circuit.advance(now_s)

    def _held(self, url: EngineUrl, role: Role) -> _Engine:
        engine = self._engines.get((url, role))
        if engine is None:
            engine = self._engines[url, role] = _Engine(role, leaving=True)
        return engine

    def _is_gone(self, engine: _Engine, now_s: float) -> bool:
        """Whether nothing is left of a leaving engine; its rest begins with the first sweep that finds it idle."""
        if not engine.leaving:
            return False
        if engine.in_flight or engine.expected:
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
        engine.said, engine.others = _IDLE, 0
        return was_up
