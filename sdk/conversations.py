"""Conversations: their lineage, the one that is current, what is said of their next turns, and their end."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bidikv.hints import Hint, Hinted, Kind, ToolTimes, current_hint, require_seconds
from bidikv.ids import Key, random_id, session_id
from bidikv.reports import ReuseReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from bidikv.links import Links
    from bidikv.reuse import TurnReport

P = ParamSpec("P")
T = TypeVar("T")

# A tuple per context, replaced and never changed: tasks and threads that copied a context cannot disturb it.
_entered: ContextVar[tuple[Conversation, ...]] = ContextVar("bidikv_conversations", default=())


class Conversation(AbstractContextManager["Conversation"], AbstractAsyncContextManager["Conversation"]):
    """A sequence of turns whose prompts extend each other. Entering it makes it current for this task or thread.

    Calls made while it is current, from whatever depth, belong to it. It may be entered often and by many tasks at
    once, and leaving it does not end it. `asyncio` tasks and `asyncio.to_thread` inherit the current conversation; bare
    threads and executors start with none (`bidikv.run_in`).

    Attributes:
        id: Wire id, a hash of the key.
        parent: Wire id of the conversation that this one works for or was forked from.
        agent: Short label for the router's logs.
        kind: What its calls are; `aux` calls are neither retained nor do they disturb.
        retain_s: Seconds within which the next turn is expected; 0 asks decode to keep nothing.
        freeze_system: The first turn's system message goes out with every turn, whatever the caller's has become.
        turns: A report for each call that was answered, in order of the answers.
    """

    def __init__(
        self,
        key: Key | None = None,
        *,
        agent: str | None = None,
        parent: str | None = None,
        kind: Kind = "main",
        retain_s: float | None = None,
        secret: bytes | None = None,
        freeze_system: bool = False,
    ) -> None:
        require_seconds("retain_s", retain_s)
        self.id = random_id() if key is None else session_id(key, secret=secret)
        self.parent = parent
        self.agent = agent
        self.kind: Kind = kind
        self.retain_s = retain_s
        self.freeze_system = freeze_system
        self.turns: list[TurnReport] = []
        self._secret = secret
        self._calls = count()
        self._tools = ToolTimes()
        self._links: Links | None = None
        self._base = Hint(kind, agent, retain_s)

    def child(
        self,
        agent: str,
        *,
        key: Key = "",
        kind: Kind | None = None,
        retain_s: float | None = None,
        freeze_system: bool = False,
    ) -> Conversation:
        """A conversation of another agent that works for this one; the same for the same agent and key.

        Two agents of one name that run at once need keys of their own.

        Args:
            agent: Short label.
            key: Tells children of one agent apart.
            kind: What its calls are; by default as here.
            retain_s: See `conversation`.
            freeze_system: See `conversation`.

        Raises:
            ConfigurationError: As for `conversation`.
        """
        return Conversation(
            (self.id, agent, key),
            agent=agent,
            parent=self.id,
            kind=kind or self.kind,
            retain_s=retain_s,
            secret=self._secret,
            freeze_system=freeze_system,
        )

    def fork(self, key: Key | None = None) -> Conversation:
        """Another continuation of this history, beside this one.

        The router finds what both share, whichever of them it belongs to.

        Args:
            key: The same key is the same fork; without one, a new one each time.

        Raises:
            ConfigurationError: As for `conversation`.
        """
        return Conversation(
            None if key is None else (self.id, ("fork", key)),
            agent=self.agent,
            parent=self.id,
            kind=self.kind,
            retain_s=self.retain_s,
            secret=self._secret,
            freeze_system=self.freeze_system,
        )

    def hint(
        self,
        *,
        kind: Kind | None = None,
        agent: str | None = None,
        retain_s: float | None = None,
        wait_s: float | None = None,
        final: bool | None = None,
    ) -> Hinted:
        """Say something of this conversation's calls in a `with` (or `async with`) block, in this task or thread.

        Hints nest: an inner one wins where it says something.

        Args:
            kind: What the calls are.
            agent: Label for the router's logs.
            retain_s: Seconds within which the next turn is expected; decode forgets the conversation after that.
            wait_s: Seconds until the next turn comes; decode protects the conversation meanwhile.
            final: No turn will follow: decode forgets the conversation with this answer.

        Raises:
            ConfigurationError: A duration is none, or there is no such kind.
        """
        return Hinted(self.id, Hint(kind, agent, retain_s, wait_s, final))

    def hints(self) -> Hint:
        """What holds for a call made now."""
        base = self._base
        if (base.kind, base.agent, base.retain_s) != (self.kind, self.agent, self.retain_s):
            base = self._base = Hint(self.kind, self.agent, self.retain_s)
        return current_hint(self.id, base)

    def tool(self, name: str, *, expected_s: float | None = None) -> ToolRun:
        """A tool of this conversation, while it runs: `with conversation.tool("search"): ...`, or `async with`.

        When it starts, decode is told to protect the conversation for as long as such a tool takes; how long that is, is
        learnt. Without a network or a router it does nothing, and never fails.

        Args:
            name: The tool.
            expected_s: Seconds that it takes at most; by default what this conversation's runs of it have taught.

        Raises:
            ConfigurationError: `expected_s` is no duration.
        """
        require_seconds("expected_s", expected_s)
        return ToolRun(self, name, expected_s)

    def tool_wait_s(self) -> float:
        """Seconds that a tool call of this conversation may take, by those that run or have run."""
        return self._tools.wait_s()

    def report(self) -> ReuseReport:
        """What was reused so far, turn by turn. Local: asks nobody."""
        return ReuseReport(tuple(self.turns))

    def close(self) -> None:
        """End the conversation: decode releases what it retains of it. Never raises; waits three seconds at most for a router.

        Reaches the routers that answered turns of this object through synchronous clients; for asynchronous ones there is
        `aclose`. What is not reached expires by itself. A later turn begins it anew.
        """
        if self._links is not None:
            self._links.release()

    async def aclose(self) -> None:
        """End the conversation, from a coroutine; see `close`. Waits at most three seconds for each router."""
        if self._links is not None:
            await self._links.arelease()

    def next_index(self) -> int:
        """Count a call, and return how many were counted before. Advisory: calls may overlap."""
        return next(self._calls)

    def links(self) -> Links:
        """The routers that hold this conversation."""
        if self._links is None:
            from bidikv.links import Links  # noqa: PLC0415 - loads the client, which has been loaded by then

            self._links = Links()
        return self._links

    def __enter__(self) -> Self:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not a token: an exit may run in another context than the enter did (generators, async fixtures).
        entered = _entered.get()
        for position in range(len(entered) - 1, -1, -1):
            if entered[position] is self:
                _entered.set(entered[:position] + entered[position + 1 :])
                return

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"Conversation({self.id}, turns={len(self.turns)})"


class ToolRun(AbstractContextManager["ToolRun"], AbstractAsyncContextManager["ToolRun"]):
    """One run of a tool; made by `Conversation.tool`. Not to be entered twice at once."""

    def __init__(self, conversation: Conversation, name: str, expected_s: float | None) -> None:
        self._conversation = conversation
        self._name = name
        self._expected_s = expected_s
        self._number = -1
        self._started_s = 0.0

    def _start(self) -> float:
        self._started_s = time.monotonic()
        self._number, wait_s = self._conversation._tools.start(self._name, self._expected_s)  # noqa: SLF001
        return wait_s

    def _end(self) -> None:
        taken_s = time.monotonic() - self._started_s
        self._conversation._tools.finish(self._number, self._name, taken_s)  # noqa: SLF001

    def __enter__(self) -> Self:
        wait_s = self._start()
        if (links := self._conversation._links) is not None:  # noqa: SLF001
            links.expect(wait_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    async def __aenter__(self) -> Self:
        wait_s = self._start()
        if (links := self._conversation._links) is not None:  # noqa: SLF001
            await links.aexpect(wait_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


def conversation(
    key: Key | None = None,
    *,
    agent: str | None = None,
    kind: Kind = "main",
    retain_s: float | None = None,
    secret: bytes | None = None,
    freeze_system: bool = False,
) -> Conversation:
    """Name a conversation: `with bidikv.conversation("ticket-17"): ...`.

    Args:
        key: The same key is the same conversation, in every process; without one, a new one each time.
        agent: Short label for the router's logs.
        kind: What its calls are.
        retain_s: Seconds within which the next turn is expected; 0 asks decode to keep nothing.
        secret: See `session_id`.
        freeze_system: Send the first turn's system message with every turn, whatever the caller's has become. Meant for
            prompts that hold the time or another thing that changes by itself.

    Raises:
        ConfigurationError: See `session_id`; or `retain_s` is no duration.
    """
    return Conversation(
        key, agent=agent, kind=kind, retain_s=retain_s, secret=secret, freeze_system=freeze_system
    )


def current_conversation() -> Conversation | None:
    """The innermost conversation entered by this task or thread."""
    entered = _entered.get()
    return entered[-1] if entered else None


def run_in(conversation: Conversation, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function as part of a conversation: for threads and executors, which start with none.

    `executor.submit(bidikv.run_in, conversation, work, 1)`, `threading.Thread(target=bidikv.run_in, args=(conversation, work))`.

    Args:
        conversation: Becomes current for the call, in this thread only.
        function: What to call. Not a coroutine function: its coroutine would run after the conversation was left.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    with conversation:
        return function(*args, **kwargs)
