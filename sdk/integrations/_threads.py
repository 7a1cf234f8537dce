"""The conversations of LangGraph threads: one for each thread, node path and agent, kept while their threads are used.

A node that is one of many (sent, or in a graph that is run for one tool call) is also told by how its history begins, so
that agents that run at once do not pass for each other's next turn. All of it follows from the config and the messages:
another process, a resumed run and a replay come to the same ids.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from bidikv.conversations import Conversation, current_conversation
from bidikv.integrations._config import call_config, place_of, side_of
from bidikv.reports import ReuseReport

if TYPE_CHECKING:
    from bidikv.integrations._config import Place

_CONVERSATIONS: Final = 2048
_TURNS: Final = 1024
"""Reports kept of one conversation."""
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


class Threads:
    """Bounded: what was used last stays longest. Any thread may call."""

    def __init__(self, max_conversations: int = _CONVERSATIONS) -> None:
        self._lock = Lock()
        self._max = max_conversations
        self._conversations: OrderedDict[str, tuple[str, Conversation]] = OrderedDict()
        # Who spoke last in each run of a graph: the caller of whatever runs below it.
        self._speakers: OrderedDict[tuple[str, str], Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._conversations)

    def conversation(self, place: Place, messages: object, *, secret: bytes | None) -> Conversation:
        """The conversation of a call that is made from this place with these messages."""
        opening = _opening(messages) if place.one_of_many else b""
        key = ("langgraph", place.thread, place.path, place.agent or "", opening)
        named = Conversation(key, agent=place.label, secret=secret)
        with self._lock:
            _, known = self._conversations.setdefault(named.id, (place.thread, named))
            self._conversations.move_to_end(named.id)
            while len(self._conversations) > self._max:
                self._conversations.popitem(last=False)
            if known.parent is None:
                known.parent = self._caller_of(place, secret)
            if place.side is None:
                self._speakers[place.thread, place.graph] = known
                self._speakers.move_to_end((place.thread, place.graph))
                while len(self._speakers) > self._max:
                    self._speakers.popitem(last=False)
        del known.turns[:-_TURNS]
        return known

    def speaker(self, place: Place) -> Conversation | None:
        """Who spoke last in the graph of this place: for a tool, the conversation that waits for it."""
        with self._lock:
            return self._speakers.get((place.thread, place.graph))

    def of_thread(self, thread: str, *, forget: bool = False) -> list[Conversation]:
        """The conversations of a thread that this process has seen, in the order of their last use."""
        with self._lock:
            found = {key: c for key, (owner, c) in self._conversations.items() if owner == thread}
            if forget:
                for key in found:
                    del self._conversations[key]
                for place in [place for place in self._speakers if place[0] == thread]:
                    del self._speakers[place]
        return list(found.values())

    def _caller_of(self, place: Place, secret: bytes | None) -> str | None:
        """Who a call works for. Where another process saw that, the node around it stands for it."""
        if place.graph_above is None:
            return None
        caller = self._speakers.get((place.thread, place.graph_above))
        if caller is not None:
            return caller.id
        return Conversation(
            ("langgraph", place.thread, place.path.rpartition("|")[0], "", b""), secret=secret
        ).id


_threads: Final = Threads()


def ambient_conversation(messages: object = None, *, secret: bytes | None = None) -> Conversation | None:
    """The conversation of the surrounding run; None outside of one, or if it has no thread."""
    return call_conversation(None, messages, secret=secret)


def call_conversation(
    chosen: Conversation | None, messages: object = None, *, secret: bytes | None = None
) -> Conversation | None:
    """The conversation of a model call: the one chosen, else the current one, else the run's.

    Calls that middleware makes for itself (summaries, tool selection) get one beside it, so that they do not pass for
    its next turn.

    Args:
        chosen: The model's own.
        messages: What is sent, as chat messages of the API.
        secret: Keys the id of the run's.
    """
    config = call_config()
    conversation = chosen or current_conversation()
    place = place_of(config) if conversation is None else None
    if place is not None:
        conversation = _threads.conversation(place, messages, secret=secret)
    side = side_of(config)
    if conversation is None or side is None or conversation.kind == "aux":
        return conversation
    aside = conversation.child(side, kind="aux", retain_s=0.0)
    speaker = _threads.speaker(place) if place is not None else None
    if speaker is not None:  # middleware runs in a node of its own, beside the one that it works for
        aside.parent = speaker.id
    return aside


def waiting_conversation() -> Conversation | None:
    """The conversation whose tool runs here: the current one, else of the agent that called it."""
    place = place_of(call_config())
    return current_conversation() or (_threads.speaker(place) if place is not None else None)


def thread_report(thread_id: object) -> ReuseReport:
    """What was reused in a thread so far, by all its agents, as far as this process made their calls.

    Args:
        thread_id: As in `{"configurable": {"thread_id": ...}}`.
    """
    conversations = _threads.of_thread(str(thread_id))
    return ReuseReport(tuple(turn for conversation in conversations for turn in conversation.turns))


def close_thread(thread_id: object) -> None:
    """End a thread: decode releases what it retains of all its agents. Never raises; see `Conversation.close`.

    Args:
        thread_id: As in `{"configurable": {"thread_id": ...}}`.
    """
    for conversation in _threads.of_thread(str(thread_id), forget=True):
        conversation.close()


async def aclose_thread(thread_id: object) -> None:
    """End a thread, from a coroutine; see `close_thread`."""
    for conversation in _threads.of_thread(str(thread_id), forget=True):
        await conversation.aclose()


def _opening(messages: object) -> bytes:
    """What tells one history from another for all its life: its first message that is no system message."""
    first: Any = next(
        (
            message
            for message in (messages if isinstance(messages, list | tuple) else ())
            if isinstance(message, Mapping) and message.get("role") not in _SYSTEM_ROLES
        ),
        None,
    )
    if first is None:
        return b""
    text = json.dumps(first, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
