"""What the engines behind a fake router retain, and the account of each turn that follows from it.

Tokens are counted as four characters each, and compared as text.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bidikv.headers import ReuseHeader
from bidikv.items import shown_items

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bidikv.headers import TurnHeader

_CHARACTERS: Final = 4
"""To a token."""
_BLOCK: Final = 16
"""Tokens to a block: whole blocks are reused."""
_TURNS: Final = 64
"""Retained of one conversation."""
_UNSPELT: Final = frozenset(
    {"annotations", "id", "index", "logprobs", "phase", "reasoning", "status", "type"}
)


class _Turn(NamedTuple):
    prompt: int
    """Characters of its prompt."""
    text: str
    """Prompt and answer."""


@dataclass(slots=True)
class Held:
    """What is held of one conversation.

    Attributes:
        turns: As a router explains them, the oldest first.
        waits_s: Announced by its tools.
        ended: Its last turn was declared final.
    """

    retained: deque[_Turn] = field(default_factory=lambda: deque(maxlen=_TURNS))
    turns: list[dict[str, Any]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    ended: bool = False


class FakeDecode:
    """Conversations by wire id or, without one, by how their prompts begin."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the conversations that something is retained of."""
        return tuple(name for name, held in self._held.items() if not held.ended)

    def find(self, key: str) -> Held | None:
        """A conversation by the router's key of it; None for one that is not held."""
        return next((self._held[name] for name in self.held if key_of(name) == key), None)

    def forget(self, key: str) -> None:
        """End a conversation: it is as if it had never been."""
        self._held = {name: held for name, held in self._held.items() if key_of(name) != key}

    def turn(
        self,
        session: str | None,
        said: TurnHeader,
        body: Mapping[str, Any],
        message: Mapping[str, Any],
        *,
        readback: bool,
    ) -> tuple[str, ReuseHeader]:
        """Play one turn: the key of its conversation, and what became of its prompt.

        Args:
            session: Wire id of the conversation.
            said: What the client says of the turn.
            body: The request.
            message: The answer.
            readback: Nothing is reused nor retained without.
        """
        prompt = spell_prompt(body)
        name = session or prompt[:256]
        if body.get("previous_response_id") is not None:
            return key_of(name), ReuseHeader("previous_response")
        reuse = self._account(name, prompt) if readback else _account("readback_off", prompt, 0)
        if said.kind != "aux" and readback:
            held = self._held.setdefault(name, Held())
            held.ended = said.final
            if said.final:
                held.retained.clear()
            elif said.retain_s != 0:
                held.retained.append(_Turn(len(prompt), prompt + _spell_answer(message, body)))
            held.turns.append(_record(reuse))
        return key_of(name), reuse

    def _account(self, name: str, prompt: str) -> ReuseHeader:
        held = self._held.get(name)
        if held is None:
            # The deepest turn that the prompt goes on from, whoever's it is.
            others = (turn for other in self._held.values() for turn in other.retained)
            found = [turn for turn in others if prompt.startswith(turn.text[: turn.prompt])]
            reuse = _compared(found, prompt)
            return reuse if reuse.remote_tokens else _account("new_conversation", prompt, 0)
        if not held.retained:
            return _account("released" if held.ended else "not_retained", prompt, 0)
        return _compared(held.retained, prompt)


def _compared(retained: Iterable[_Turn], prompt: str) -> ReuseHeader:
    """The account of a prompt beside the turn that shares most with it, of several the longest."""
    shared, longest = max(((_shared(turn.text, prompt), len(turn.text)) for turn in retained), default=(0, 0))
    remote = shared // _CHARACTERS // _BLOCK * _BLOCK
    extends = min(longest, len(prompt)) - shared < _CHARACTERS * _BLOCK
    reason = "hit" if extends and remote else "hit_diverged" if remote else "diverged"
    return _account(reason, prompt, remote)


def _account(reason: str, prompt: str, remote: int) -> ReuseHeader:
    tokens = -(-len(prompt) // _CHARACTERS)
    diverged = remote if reason in {"hit_diverged", "diverged"} else None
    return ReuseHeader(reason, tokens, remote, 0, tokens - remote, diverged)


def _record(reuse: ReuseHeader) -> dict[str, Any]:
    """A turn as a router explains it."""
    return {
        "reason": reuse.reason,
        "advice": f"This is a fake router's advice on {reuse.reason}.",
        "prompt_tokens": reuse.prompt_tokens,
        "remote_tokens": reuse.remote_tokens,
        "computed_tokens": reuse.computed_tokens,
        "placement": "home",
    }


def key_of(name: str) -> str:
    """As a router's keys look: 32 hex characters."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _shared(before: str, now: str) -> int:
    """Characters at the start that both have."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((place for place, (old, new) in pairs if old != new), min(len(before), len(now)))


def spell_prompt(body: Mapping[str, Any]) -> str:
    """A prompt as a template would write it: tools first, then the messages, with reasoning left out."""
    parts = [json.dumps(body["tools"])] if body.get("tools") else []
    shown = shown_items(body)
    messages = body.get("messages", body.get("prompt", "")) if shown is None else shown[0]
    if isinstance(messages, str):
        return "".join([*parts, messages])
    return "".join([*parts, *(json.dumps(_fields(message), sort_keys=True) for message in messages)])


def _spell_answer(message: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """An answer as the next prompt holds it: of the Responses API, its text and each of its calls by itself."""
    if "input" not in body or not message.get("tool_calls"):
        return spell_prompt({"messages": [message]})
    parts = [{"role": "assistant", "content": message["content"]}] if message["content"] else []
    calls = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in message["tool_calls"]]
    return spell_prompt({"messages": [*parts, *calls]})


def _fields(message: Any) -> Any:
    """What a template prints of a message, or of an item of the Responses API."""
    if not isinstance(message, Mapping):  # a prompt of token ids
        return message
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(part["text"] for part in content)
    # Null and empty content are spelt alike: a stream does not say which of the two it was.
    fields = {name: value for name, value in message.items() if name not in _UNSPELT and name != "content"}
    return {**fields, "content": content} if content else fields
