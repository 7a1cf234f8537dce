"""What a conversation knows of its next turn: hints of the caller, and how long its tools take (standard library only)."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from bidikv.errors import ConfigurationError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

Kind: TypeAlias = Literal["main", "tool", "aux", "compaction"]
"""What a call is: a turn, a turn that answers a tool call, an auxiliary call (title, summary), or a rewritten history."""
KINDS: Final = frozenset({"main", "tool", "aux", "compaction"})

_UNKNOWN_TOOL_S: Final = 30.0
"""How long a tool may take of which nothing is known yet."""
_MARGIN: Final = 2.0
_REMEMBERED: Final = 16


@dataclass(frozen=True, slots=True)
class Hint:
    """What the caller says of the turns to come; None says nothing.

    Attributes:
        kind: What the calls are.
        agent: Label for the router's logs.
        retain_s: Seconds within which the next turn is expected; decode forgets the conversation after that.
        wait_s: Seconds that the next turn takes to come; decode protects the conversation meanwhile.
        final: No turn will follow.
    """

    kind: Kind | None = None
    agent: str | None = None
    retain_s: float | None = None
    wait_s: float | None = None
    final: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything.

        Raises:
            ConfigurationError: A duration is none, or there is no such kind.
        """
        require_seconds("retain_s", self.retain_s)
        require_seconds("wait_s", self.wait_s)
        if self.kind is not None and self.kind not in KINDS:
            raise ConfigurationError(f"kind is one of {', '.join(sorted(KINDS))}, not {self.kind!r}")

    def over(self, below: Hint) -> Hint:
        """This hint, and what another one says where this says nothing."""
        said = {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None
        }
        return replace(below, **said)


def require_seconds(name: str, value: float | None) -> None:
    """Refuse what is no duration.

    Raises:
        ConfigurationError: It is negative, infinite or not a number.
    """
    if value is not None and not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} is a number of seconds, not {value}")


# Replaced and never changed, as the entered conversations are.
_hints: ContextVar[tuple[Hinted, ...]] = ContextVar("bidikv_hints", default=())


class Hinted(AbstractContextManager["Hinted"], AbstractAsyncContextManager["Hinted"]):
    """A hint in force while it is entered, for one conversation and in this task or thread only."""

    def __init__(self, session: str, hint: Hint) -> None:
        self.session = session
        self.hint = hint

    def __enter__(self) -> Self:
        _hints.set((*_hints.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = _hints.get()
        for position in range(len(entered) - 1, -1, -1):
            if entered[position] is self:
                _hints.set(entered[:position] + entered[position + 1 :])
                return

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def current_hint(session: str, base: Hint) -> Hint:
    """The hints in force for a conversation, the innermost first, over what always holds for it."""
    merged = base
    for hinted in _hints.get():
        if hinted.session == session:
            merged = hinted.hint.over(merged)
    return merged


class ToolTimes:
    """How long a conversation's tools have taken, and which of them run. Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers = count()
        self._running: dict[int, float] = {}
        self._taken: dict[str, deque[float]] = {}

    def start(self, name: str, expected_s: float | None) -> tuple[int, float]:
        """A tool has started: its number, and the seconds it may take."""
        with self._lock:
            wait_s = expected_s if expected_s is not None else self._usual(name)
            number = next(self._numbers)
            self._running[number] = time.monotonic() + wait_s
            return number, wait_s

    def finish(self, number: int, name: str, taken_s: float) -> None:
        """A tool has ended after so many seconds."""
        with self._lock:
            if self._running.pop(number, None) is None:
                return
            self._taken.setdefault(name, deque(maxlen=_REMEMBERED)).append(taken_s)

    def wait_s(self) -> float:
        """Seconds that the next tool call may take: of those that run, else of those that have run."""
        if not self._running and not self._taken:
            return _UNKNOWN_TOOL_S
        with self._lock:
            now_s = time.monotonic()
            running = [until_s - now_s for until_s in self._running.values()]
            known = [_MARGIN * max(taken) for taken in self._taken.values()]
        return max(0.001, *running, *(known or [_UNKNOWN_TOOL_S]))

    def _usual(self, name: str) -> float:
        taken = self._taken.get(name)
        return _MARGIN * max(taken) if taken else _UNKNOWN_TOOL_S
