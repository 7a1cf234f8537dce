"""What a client remembers of its conversations: hashes of their histories, and the model's own spelling of tool calls.

Bounded: the conversation used last stays longest. Any thread may call.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from bidikv.drift import Drift, History, Reading, compare
from bidikv.fidelity import is_as_generated, ordered_tools, restored_message
from bidikv.items import restored_items, shown_items
from bidikv.marks import Tools, spelling_of, tools_of
from bidikv.spellings import Spelling

if TYPE_CHECKING:
    from bidikv.fidelity import Answer
    from bidikv.items import ItemsAnswer

Restore: TypeAlias = Literal["off", "spelling", "all"]
RESTORE: Final = ("off", "spelling", "all")

_SESSIONS: Final = 256
_HISTORIES: Final = 8
"""Of one conversation: its branches and parallel calls."""
_SPELLINGS: Final = 512
"""Tool calls, and answers with reasoning, of one conversation."""
_RESPONSES: Final = 16
"""Responses of one conversation that later requests may go on from."""
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


@dataclass(slots=True)
class _Session:
    histories: deque[History] = field(default_factory=lambda: deque(maxlen=_HISTORIES))
    arguments: OrderedDict[str, str] = field(default_factory=OrderedDict)
    blanks: OrderedDict[str, str | None] = field(default_factory=OrderedDict)
    reasoning: OrderedDict[tuple[Any, ...], tuple[str, str]] = field(default_factory=OrderedDict)
    tools: dict[str, int] = field(default_factory=dict)
    tool_sets: OrderedDict[int, Tools] = field(default_factory=OrderedDict)
    system: Mapping[str, Any] | None = None
    keys: dict[str, None] = field(default_factory=dict)
    responses: OrderedDict[str, _Response] = field(default_factory=OrderedDict)
    respelt: bool = False


class _Response(NamedTuple):
    """What is kept of a response that a later request may go on from.

    Attributes:
        history: Of its request, and what it says.
        opening: How many marks at its start are of instructions.
    """

    history: History
    opening: int


class Reviewed(NamedTuple):
    """One request, compared with those before it.

    Attributes:
        changes: Body fields to send in place of the caller's.
        restored: Where the caller's spelling was put right, as paths of the request.
        drift: How what is sent relates to the requests before it.
        history: What to keep of it once it is answered.
        tools: What the tools are known by, as they are sent: the hash of their spelling, and of the body after the messages.
        opening: How many marks at the start of its history are of instructions.
    """

    changes: dict[str, Any]
    restored: tuple[str, ...]
    drift: Drift
    history: History
    tools: tuple[int, ...]
    opening: int = 0


class Memory:
    """Conversations by wire id."""

    def __init__(self, max_sessions: int = _SESSIONS) -> None:
        self._lock = Lock()
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._sessions)

    def respells(self, session: str) -> bool:
        """Whether requests of this conversation have been put into another spelling, so that the next one will be as well."""
        known = self._sessions.get(session)
        return known is not None and known.respelt

    def review(
        self,
        session: str,
        body: Mapping[str, Any],
        *,
        restore: Restore,
        freeze_system: bool = False,
        content: bytes | None = None,
    ) -> Reviewed | None:
        """Compare a request with the conversation's earlier ones; None if it does not show them all. Remembers nothing yet.

        Args:
            session: The conversation.
            body: The request's.
            restore: How far its history is put back into the model's own spelling.
            freeze_system: Repeat the first system message.
            content: The body as it is sent, where that is known already: then a history that goes on is not walked through.
        """
        if "messages" not in body:
            return self._review_items(session, body, restore=restore)
        messages = body["messages"]
        if not isinstance(messages, list | tuple):
            return None
        restored: list[str] = []
        with self._lock:
            known = self._sessions.get(session) or _Session()
            exact = None if content is None else Spelling.in_body(content, body, "messages")
            reading = Reading(messages, (), exact)
            told = _Tools.of(body.get("tools"), known, reading.rest(known.histories), restore, restored)
            reading.tools = told.tools
            spelt = None
            if restore != "off":
                # What went out before in this spelling needs no other one.
                start = max(map(reading.alike, known.histories), default=0)
                spelt = _spelt(messages, known, restored, start, reasoning=restore == "all")
            if freeze_system and known.system is not None:
                spelt = _frozen(messages if spelt is None else spelt, known.system, restored) or spelt
            changes = told.changes
            if spelt is not None:
                changes["messages"] = spelt
                reading = Reading(spelt, reading.tools)
            drift, base, shared = compare(reading, known.histories)
            history = reading.history(base, shared)
            return Reviewed(changes, tuple(restored), drift, history, told.keys)

    def _review_items(self, session: str, body: Mapping[str, Any], *, restore: Restore) -> Reviewed | None:
        """The same for a request of the Responses API; None also if it goes on from a response that is not remembered."""
        earlier = body.get("previous_response_id")
        restored: list[str] = []
        with self._lock:
            known = self._sessions.get(session) or _Session()
            given, changes = body.get("input"), {}
            if restore != "off" and isinstance(given, list | tuple):
                spelt = restored_items(given, known.arguments, restored)
                if spelt is not None:
                    changes["input"] = spelt
                    body = {**body, "input": spelt}
            shown, before = shown_items(body), known.responses.get(str(earlier))
            if shown is None or (earlier is not None and before is None):
                return None
            messages, places = shown
            opening = 1 if body.get("instructions") else 0
            if before is not None:  # whose own instructions do not count
                kept = before.history.marks[before.opening :]
                messages[opening:opening] = kept
                places[opening:opening] = [None] * len(kept)
            told = _Tools.of(body.get("tools"), known, None, restore, restored)
            changes |= told.changes
            reading = Reading(messages, told.tools)
            drift, base, shared = compare(reading, known.histories)
            history = reading.history(base, shared)
            return Reviewed(
                changes, tuple(restored), _placed(drift, places, opening), history, told.keys, opening
            )

    def answered(
        self,
        session: str,
        reviewed: Reviewed,
        body: Mapping[str, Any],
        answer: Answer | ItemsAnswer | None = None,
        *,
        key: str | None = None,
        freeze_system: bool = False,
    ) -> None:
        """Remember a request that was answered, and the answer if it is there already.

        Args:
            session: Its conversation.
            reviewed: What it was found to be.
            body: Its fields.
            answer: What the model said.
            key: Under which the router knows the conversation.
            freeze_system: Keep its system message, which is to be repeated.
        """
        history = reviewed.history
        said = () if answer is None else answer.messages()
        newest = history if answer is None else history.with_answer(*said)
        with self._lock:
            known = self._session(session)
            known.respelt = known.respelt or bool(reviewed.changes)
            _replace(known.histories, history, newest)
            for name_of_set in reviewed.tools:
                if name_of_set not in known.tool_sets:
                    _put(known.tool_sets, name_of_set, history.tools, most=2 * _HISTORIES)
                    for name, _ in history.tools:
                        known.tools.setdefault(name, len(known.tools))
            if key is not None:
                known.keys[key] = None
            if freeze_system and known.system is None:
                known.system = _system_of(body.get("messages"))
            if answer is not None:
                _keep(known, answer, said, newest, reviewed.opening)

    def generated(self, session: str, reviewed: Reviewed, answer: Answer | ItemsAnswer) -> None:
        """Remember what the model said to a request that is remembered already."""
        said = answer.messages()
        longer = reviewed.history.with_answer(*said)
        with self._lock:
            known = self._session(session)
            _replace(known.histories, reviewed.history, longer)
            _keep(known, answer, said, longer, reviewed.opening)

    def held(self, session: str, key: str) -> None:
        """Remember under which key a router knows a conversation."""
        with self._lock:
            self._session(session).keys[key] = None

    def keys(self, session: str, *, forget: bool = False) -> tuple[str, ...]:
        """Under which keys routers know a conversation; forgets the conversation if asked to."""
        with self._lock:
            known = self._sessions.pop(session, None) if forget else self._sessions.get(session)
            return tuple(known.keys) if known is not None else ()

    def _session(self, session: str) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return known


def _keep(
    known: _Session,
    answer: Answer | ItemsAnswer,
    said: Sequence[Mapping[str, Any]],
    history: History,
    opening: int,
) -> None:
    """Keep the model's own spelling of what clients spell otherwise, and what a later request may name."""
    for message in said:
        calls = message.get("tool_calls", ()) if isinstance(message, Mapping) else ()
        for call in calls:
            if call["id"]:
                _put(known.arguments, call["id"], call["function"]["arguments"])
        if calls and calls[0]["id"] and not message["content"] and answer.blank_is_known:
            _put(known.blanks, calls[0]["id"], message["content"])
        if answer.reasoning is not None:
            _put(known.reasoning, _name(message), answer.reasoning)
    if answer.response_id is not None:
        _put(known.responses, answer.response_id, _Response(history, opening), most=_RESPONSES)


def _placed(drift: Drift, places: Sequence[int | None], opening: int) -> Drift:
    """A difference where the request has it: in its items, or in its instructions."""
    at = drift.message
    if at is None:
        return replace(drift, where="input")
    if at < opening:
        return replace(drift, message=None, where="instructions")
    return replace(drift, message=places[at] if at < len(places) else None, where="input")


class _Tools(NamedTuple):
    """The tools of a request as they are to be sent.

    Attributes:
        tools: See `History`.
        changes: The field to send in place of the caller's, if any.
        keys: See `Reviewed.tools`.
    """

    tools: Tools
    changes: dict[str, Any]
    keys: tuple[int, ...]

    @classmethod
    def of(
        cls, tools: Any, known: _Session, rest: int | None, restore: Restore, restored: list[str]
    ) -> _Tools:
        """Look them up by what follows the messages, else by their own spelling; put in their first order."""
        if not tools:
            return cls((), {}, ())
        if rest is not None and (offered := known.tool_sets.get(rest)) is not None:
            return cls(offered, {}, ())
        spelling = spelling_of(tools)
        offered = known.tool_sets.get(spelling or 0)
        changes: dict[str, Any] = {}
        if offered is None and restore != "off" and isinstance(tools, list | tuple):
            ordered = ordered_tools(tools, known.tools)
            if ordered is not None:
                changes["tools"] = tools = ordered
                spelling, rest = spelling_of(tools), None
                restored.append("tools")
        keys = tuple(key for key in (spelling, rest) if key is not None)
        return cls(tools_of(tools) if offered is None else offered, changes, keys)


def _put(entries: OrderedDict[Any, Any], name: Any, value: Any, *, most: int = _SPELLINGS) -> None:
    entries[name] = value
    while len(entries) > most:
        entries.popitem(last=False)


def _replace(histories: deque[History], old: History, new: History) -> None:
    """Put a history first, in place of itself without its answer and of those that it only continues."""
    if len(histories) == 1 and _continues(new, histories[0]):
        histories[0] = new  # a conversation without branches
        return
    kept = [
        history
        for history in histories
        if history is not old and not _continues(new, history) and not _continues(history, new)
    ]
    histories.clear()
    histories.extend([new, *kept][:_HISTORIES])


def _continues(longer: History, shorter: History) -> bool:
    """Whether a history goes on from another one: they share their marks, not only what these say."""
    count = len(shorter.marks)
    if longer is shorter or longer.tools != shorter.tools or len(longer.marks) <= count or not count:
        return False
    return longer.marks[count - 1] is shorter.marks[-1]


def _spelt(
    messages: Sequence[Any], known: _Session, restored: list[str], start: int, *, reasoning: bool
) -> list[Any] | None:
    """The messages with the model's own spelling; None if they have it."""
    recalls = reasoning and bool(known.reasoning)
    if not known.arguments and not recalls:
        return None
    spelt: list[Any] | None = None
    for index in range(start, len(messages)):
        message = messages[index]
        if not isinstance(message, dict) or not (message.get("tool_calls") or recalls):
            continue
        if message.get("role") != "assistant":
            continue
        if not recalls and is_as_generated(message, known.arguments, known.blanks):
            continue
        lost = known.reasoning.get(_name(message)) if recalls else None
        found = restored_message(message, known.arguments, known.blanks, lost)
        if found is not None:
            spelt = list(messages) if spelt is None else spelt
            spelt[index], fields = found
            restored += [f"messages[{index}].{name}" for name in fields]
    return spelt


def _name(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one answer from another, as far as clients send it back."""
    calls = message.get("tool_calls") or ()
    return (
        hash(str(message.get("content") or "")),
        *(call.get("id") for call in calls if isinstance(call, Mapping)),
    )


def _system_of(messages: Any) -> Mapping[str, Any] | None:
    first = messages[0] if isinstance(messages, list | tuple) and messages else None
    return dict(first) if isinstance(first, Mapping) and first.get("role") in _SYSTEM_ROLES else None


def _frozen(messages: Sequence[Any], system: Mapping[str, Any], restored: list[str]) -> list[Any] | None:
    current = _system_of(messages)
    if current is None or current == system:
        return None
    restored.append("messages[0]")
    return [dict(system), *messages[1:]]
