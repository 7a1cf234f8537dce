"""What a client remembers of its conversations: each request is compared with those before it, and put into the model's own spelling.

Bounded: the conversation used last stays longest. Any thread may call.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from bidikv.drift import Drift, History, Reading, compare
from bidikv.items import restored_items, shown_items
from bidikv.kept import Kept
from bidikv.spellings import Spelling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bidikv.fidelity import Answer
    from bidikv.items import ItemsAnswer
    from bidikv.spellings import Rest

Restore: TypeAlias = Literal["off", "spelling", "all"]
RESTORE: Final = ("off", "spelling", "all")

_SESSIONS: Final = 256


class Reviewed(NamedTuple):
    """One request, compared with those before it.

    Attributes:
        changes: Body fields to send in place of the caller's.
        restored: Where the caller's spelling was put right, as paths of the request.
        drift: How what is sent relates to the requests before it.
        history: What to keep of it once it is answered.
        tools: What the tools are known by, as they are sent: see `KnownTools.keys`.
        opening: How many marks at the start of its history are of instructions.
    """

    changes: dict[str, Any]
    restored: tuple[str, ...]
    drift: Drift
    history: History
    tools: tuple[int | Rest, ...]
    opening: int = 0


class Memory:
    """Conversations by wire id."""

    def __init__(self, max_sessions: int = _SESSIONS) -> None:
        self._lock = Lock()
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, Kept] = OrderedDict()

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
        with self._lock:
            known = self._sessions.get(session) or Kept()
            exact = None if content is None else Spelling.in_body(content, body, "messages")
            reading = Reading(messages, known.histories, exact)
            told = known.look_up_tools(body.get("tools"), reading.rest, restore=restore != "off")
            changes, restored = {**told.changes}, [*told.changes]
            if restore != "off":
                # What went out before in this spelling needs no other one.
                respelt = known.respell(messages, reading.start, reasoning=restore == "all")
                if respelt is not None:
                    changes["messages"], paths = respelt
                    restored += paths
            if freeze_system:
                frozen = known.with_system(changes.get("messages", messages))
                if frozen is not None:
                    changes["messages"] = frozen
                    restored.append("messages[0]")
            if "messages" in changes:
                reading = Reading(changes["messages"], known.histories)
            reading.tools = told.tools
            drift, base, shared = compare(reading)
            history = reading.history(base, shared)
            return Reviewed(changes, tuple(restored), drift, history, told.keys)

    def _review_items(self, session: str, body: Mapping[str, Any], *, restore: Restore) -> Reviewed | None:
        """The same for a request of the Responses API; None also if it goes on from a response that is not remembered."""
        earlier = body.get("previous_response_id")
        restored: list[str] = []
        with self._lock:
            known = self._sessions.get(session) or Kept()
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
                kept = before.history.marks.part(before.opening)
                messages[opening:opening] = kept
                places[opening:opening] = [None] * len(kept)
            told = known.look_up_tools(body.get("tools"), None, restore=restore != "off")
            changes |= told.changes
            restored += told.changes
            reading = Reading(messages, known.histories)
            reading.tools = told.tools
            drift, base, shared = compare(reading)
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
        with self._lock:
            newest = history if answer is None else history.with_answer(*said)
            known = self._session(session)
            known.respelt = known.respelt or bool(reviewed.changes)
            known.keep_history(history, newest)
            known.keep_tools(history.tools, reviewed.tools)
            if key is not None:
                known.keys[key] = None
            if freeze_system:
                known.keep_system(body.get("messages"))
            if answer is not None:
                known.keep_answer(answer, said, newest, reviewed.opening)

    def generated(self, session: str, reviewed: Reviewed, answer: Answer | ItemsAnswer) -> None:
        """Remember what the model said to a request that is remembered already."""
        said = answer.messages()
        with self._lock:
            longer = reviewed.history.with_answer(*said)
            known = self._session(session)
            known.keep_history(reviewed.history, longer)
            known.keep_answer(answer, said, longer, reviewed.opening)

    def held(self, session: str, key: str) -> None:
        """Remember under which key a router knows a conversation."""
        with self._lock:
            self._session(session).keys[key] = None

    def keys(self, session: str, *, forget: bool = False) -> tuple[str, ...]:
        """Under which keys routers know a conversation; forgets the conversation if asked to."""
        with self._lock:
            known = self._sessions.pop(session, None) if forget else self._sessions.get(session)
            return tuple(known.keys) if known is not None else ()

    def _session(self, session: str) -> Kept:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = Kept()
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return known


def _placed(drift: Drift, places: Sequence[int | None], opening: int) -> Drift:
    """A difference where the request has it: in its items, or in its instructions."""
    at = drift.message
    if at is None:
        return drift._replace(where="input")
    if at < opening:
        return drift._replace(message=None, where="instructions")
    return drift._replace(message=places[at] if at < len(places) else None, where="input")
