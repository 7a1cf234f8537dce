"""How a request's history relates to those before it, told without a tokenizer and without keeping any text.

A turn can reuse the turns before it only as far as its prompt begins as theirs did. What is kept of a history is a
hash of each message's fields, so a change is found with the message and the field at fault, and nothing of a
conversation's content stays in memory or gets into a message. Standard library only, pure.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from bidikv.marks import MAPPING, Mark, Marks, Tools, mark_of
from bidikv.spellings import Rest, Spelling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DriftKind: TypeAlias = Literal["start", "append", "retry", "rewind", "fork", "edit", "tools", "system"]

_STEPS: Final = 8
"""Steps of a spelling that are looked at one by one before they become one."""
_PROMPT: Final = attrgetter("prompt")
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


class Drift(NamedTuple):
    """How one request's history relates to the closest one before it in its conversation.

    Attributes:
        kind: `start` (shares no message with any), `append`, `retry` (the same again), `rewind` (an earlier state of it),
            `fork` (another continuation), or one that loses reuse: `edit`, `tools`, `system`.
        message: Index of the first message that differs; None where no message does.
        field: What differs: a field of that message, `role`, or the name of a tool; None if a message was put in or taken out.
        kept_messages: Messages at the start that are as they were.
        lost_messages: Messages of the earlier history after those.
        where: Which field of the request holds that message: `messages`, `input` or `instructions`.
    """

    kind: DriftKind
    message: int | None = None
    field: str | None = None
    kept_messages: int = 0
    lost_messages: int = 0
    where: str = "messages"

    @property
    def breaks_prefix(self) -> bool:
        """Whether something changed that should have stayed, so that what follows it is computed again."""
        return self.kind in {"edit", "tools", "system"}

    @property
    def path(self) -> str | None:
        """Where the first difference is, as the request spells it: `messages[3].content`, `tools[search]`."""
        if self.kind == "tools":
            return "tools" if self.field is None else f"tools[{self.field}]"
        if self.message is None:
            return self.where if self.where == "instructions" else None
        return f"{self.where}[{self.message}]" + (f".{self.field}" if self.field else "")

    @property
    def summary(self) -> str:
        """In a few words."""
        return self.kind if self.path is None else f"{self.kind} at {self.path}"

    @property
    def advice(self) -> str:
        """What to change, in one sentence; empty where nothing is wrong."""
        return _ADVICE.get(self.kind, "")

    def __str__(self) -> str:
        if not self.breaks_prefix:
            return self.summary
        return f"{self.path} is not what it was in the turn before, so {_what_is_lost(self)} computed again: {self.advice}"


_ADVICE: Final = {
    "edit": "append to the history instead of rewriting it, and send answers back as they came"
    " (bidikv.message_of gives them in the form to send).",
    "tools": "send the same tools, in the same order and spelling, with every turn; tools stand in front of the history.",
    "system": "keep the system message the same in every turn and put what changes into the newest message, or name the"
    " conversation with freeze_system=True.",
}


def _what_is_lost(drift: Drift) -> str:
    if drift.kind == "tools":
        return "the whole prompt is"
    return "this message and all after it are"


class History(NamedTuple):
    """What is kept of one request.

    Attributes:
        marks: Of its messages, and of the answer once that is known.
        tools: Hash of each tool by name, in order.
        prompt: How many of the marks are of its prompt.
        steps: Where turns ended in one exact spelling of its prompt, in bytes; the last is its end. Empty if it has none.
        exact: Hash of those bytes, step by step.
        answers: How many messages of its prompt are the model's.
        rest: What its body says beside its messages; None if that cannot be told.
    """

    marks: Marks
    tools: Tools
    prompt: int
    steps: tuple[int, ...] = ()
    exact: int = 0
    answers: int = 0
    rest: Rest | None = None

    def with_answer(self, *messages: Mapping[str, Any]) -> History:
        """The same history and the answer to it."""
        marks = self.marks.then(self.prompt, map(mark_of, messages))
        return History(marks, self.tools, self.prompt, self.steps, self.exact, self.answers, self.rest)


_NOTHING: Final = History(Marks([], 0), (), 0)


class Reading:
    """One request's messages, hashed one by one only as far as they differ from those before.

    Args:
        messages: In the order in which they are sent.
        histories: Those before it, the newest first.
        spelling: Those messages in one exact spelling; by default one that is made here.

    Attributes:
        tools: See `History`; to be set before anything is compared.
        rest: What the request's body says beside them; None if that cannot be told.
    """

    def __init__(
        self, messages: Sequence[Any], histories: Sequence[History], spelling: Spelling | None = None
    ) -> None:
        self.messages = messages
        self.histories = histories
        self.tools: Tools = ()
        self._spelling = spelling = Spelling.of(messages) if spelling is None else spelling
        self._marks: dict[int, Mark] = {}
        # All of an agent's history comes back as it was, nearly always: that takes one look.
        self._alike = [old for old in histories if spelling.begins(old.steps, old.exact)]
        self._known = known = max(self._alike, key=_PROMPT, default=_NOTHING)
        size = known.steps[-1] if known.steps else 0
        self._end, self.rest = spelling.split(messages, known.prompt, size, known.rest)

    @property
    def start(self) -> int:
        """Messages at the start that are a history's whole prompt, byte for byte; 0 if there is none such."""
        return self._known.prompt

    def mark(self, index: int) -> Mark:
        """The mark of one message."""
        mark = self._marks.get(index)
        if mark is None:
            mark = self._marks[index] = mark_of(self.messages[index])
        return mark

    def same(self, index: int, mark: Mark) -> bool:
        """Whether a message is the one that was marked."""
        return self.mark(index).fields == mark.fields

    def shared(self, history: History) -> int:
        """Messages at the start that are as they were in that history."""
        marks = history.marks
        limit = min(len(marks), len(self.messages))
        start = min(history.prompt, limit) if history in self._alike else 0
        for index, mark in enumerate(marks.part(start, limit), start):
            if not self.same(index, mark):
                return index
        return limit

    def history(self, base: History | None, shared: int) -> History:
        """What to keep of the request; marks that it shares with an earlier history are that history's own."""
        messages, known, end = self.messages, self._known, self._end
        before = Marks([], 0) if base is None else base.marks
        marks = before.then(shared, map(self.mark, range(shared, len(messages))))
        steps, exact = known.steps, known.exact
        start = steps[-1] if steps else 0
        if end and (not start or len(steps) == _STEPS):
            steps, exact = (end,), self._spelling.hash(0, end)
        elif end > start:
            steps, exact = (*steps, end), self._spelling.hash(start, end, exact)
        elif not end:
            steps, exact = (), 0
        answers = known.answers + count_answers(messages, known.prompt)
        return History(marks, self.tools, len(messages), steps, exact, answers, self.rest)


def compare(reading: Reading) -> tuple[Drift, History | None, int]:
    """Relate a request to the histories before it.

    Returns:
        The relation, the history it is to, and how many messages both share.
    """
    best: History | None = None
    shared = -1
    for history in reading.histories:
        count = reading.shared(history)
        if count > shared:
            best, shared = history, count
        if count == len(history.marks) or count == len(reading.messages):
            break  # it continues this one, or repeats a part of it
    if best is None:
        return Drift("start"), None, 0
    return _relate(reading, best, shared), best, shared


def _relate(reading: Reading, old: History, shared: int) -> Drift:
    if shared == len(old.marks) < len(reading.messages) and reading.tools == old.tools:
        return Drift("append", kept_messages=shared)  # nearly always
    lost = len(old.marks) - shared
    shares_more = shared > _leading_system(old.marks.part(0, shared))
    changed: Drift | None = None
    kind: DriftKind
    if shared < min(len(reading.messages), len(old.marks)):
        changed = _change(reading, old, shared)
        kind = "fork" if shares_more else "start"
    elif shared < len(reading.messages):
        kind = "append"
    elif shared == len(old.marks):
        kind = "retry" if shared == old.prompt else "append"
    else:
        kind = "retry" if shared == old.prompt else "rewind"
    related = shares_more or changed is not None or kind in {"append", "retry"}
    if related and reading.tools != old.tools:
        # In front of all messages, so that it costs more than any change of those.
        return Drift("tools", None, _differing_tool(reading.tools, old.tools), 0, len(old.marks))
    if changed is not None:
        return changed
    return Drift(kind, None, None, shared, lost if kind in {"rewind", "fork"} else 0)


def _change(reading: Reading, old: History, at: int) -> Drift | None:
    """A change of what should have stayed; None if the request merely goes another way from there."""
    lost = len(old.marks) - at
    before, now = old.marks[at], reading.mark(at)
    field = _differing_field(before, now)
    goes_on = any(
        reading.same(index, old.marks[index])
        for index in range(at + 1, min(len(old.marks), len(reading.messages)))
    )
    if before.role in _SYSTEM_ROLES and now.role in _SYSTEM_ROLES:
        return Drift("system", at, field, at, lost) if goes_on else None
    if goes_on:
        return Drift("edit", at, field, at, lost)
    if _taken_out(reading, old, at) or _put_in(reading, old, at):
        return Drift("edit", at, None, at, lost)
    # An answer that comes back changed is never another way on: the model said something else.
    return Drift("edit", at, field, at, lost) if before.role == now.role == "assistant" else None


def _taken_out(reading: Reading, old: History, at: int) -> bool:
    """Whether the request goes on where the old history stands later."""
    rest = old.marks.part(at)
    for skipped in range(1, len(rest)):
        if rest[skipped].fields != reading.mark(at).fields:
            continue
        if skipped + 1 == len(rest) or at + 1 == len(reading.messages):
            return True
        if rest[skipped + 1].fields == reading.mark(at + 1).fields:
            return True
    return False


def _put_in(reading: Reading, old: History, at: int) -> bool:
    """Whether the old history goes on one or two messages later."""
    following = range(at + 1, min(at + 3, len(reading.messages)))
    return any(reading.mark(index).fields == old.marks[at].fields for index in following)


def _leading_system(marks: Sequence[Mark]) -> int:
    return next((n for n, mark in enumerate(marks) if mark.role not in _SYSTEM_ROLES), len(marks))


def _differing_field(old: Mark, new: Mark) -> str | None:
    if old.role != new.role:
        return "role"
    names = [*old.fields, *(name for name in new.fields if name not in old.fields)]
    return next((name for name in names if old.fields.get(name) != new.fields.get(name)), None)


def _differing_tool(new: Tools, old: Tools) -> str | None:
    """Name of the first tool that was changed, added or taken out; None when only their order differs."""
    before, after = dict(old), dict(new)
    changed = [name for name, _ in [*new, *old] if before.get(name) != after.get(name)]
    return changed[0] if changed else None


def count_answers(messages: Sequence[Any], start: int = 0) -> int:
    """How many messages are the model's, from that one on."""
    roles = [message.get("role") if isinstance(message, MAPPING) else None for message in messages[start:]]
    return roles.count("assistant")
