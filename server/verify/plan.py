"""What to play: conversations of random operations, decided by a seed alone. Pure.

A plan is made before anything is asked, so a request names the answers it repeats (`AnswerOf`) instead of holding them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Endpoint = Literal["chat", "completions"]

MAX_PROMPT_TOKENS: Final = 1500
MAX_ANSWER_TOKENS: Final = 96
TOKENS_PER_WORD: Final = 1.6
"""A high guess for English."""
MESSAGE_TOKENS: Final = 8
"""A high guess of what a chat template adds to each message."""
TOOL_TOKENS: Final = 200
EXPIRE_S: Final = 0.001


class Op(StrEnum):
    """How a turn comes from what was said before."""

    OPEN = "open"
    """A new conversation."""
    APPEND = "append"
    EDIT_USER = "edit_user"
    """An earlier user message is changed; what follows it stays or goes."""
    EDIT_ANSWER = "edit_answer"
    """An earlier answer is replaced by another text."""
    REWIND = "rewind"
    """The end is cut off, and something else is asked."""
    REGENERATE = "regenerate"
    """The same request again."""
    FORK = "fork"
    """A new session goes on from here."""
    RETRY = "retry"
    """The same request twice at once."""
    TOOL_CALL = "tool_call"
    AUX = "aux"
    """A request on the side (k=aux), which the conversation does not remember."""
    EXPIRE = "expire"
    """The next turn comes after this one's TTL."""
    JUNK = "junk"
    """The client sends `kv_transfer_params` of its own."""


@dataclass(frozen=True, slots=True)
class Text:
    """A message whose text is known."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class AnswerOf:
    """What the model answered in an earlier turn of this conversation."""

    turn: int


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the tool said to the call made in an earlier turn."""

    turn: int
    text: str


Part = Text | AnswerOf | ToolResult


@dataclass(frozen=True, slots=True)
class Features:
    """What the served model can do.

    Attributes:
        max_model_len: Longest prompt and answer, in tokens.
        tools: A named `tool_choice` works.
        system: System messages work.
        completions: The completions API works.
        token_ids: Answers tell their token ids.
    """

    max_model_len: int
    tools: bool = True
    system: bool = True
    completions: bool = True
    token_ids: bool = True

    @property
    def max_prompt_tokens(self) -> int:
        """How long a planned prompt may be."""
        return max(MESSAGE_TOKENS, min(MAX_PROMPT_TOKENS, self.max_model_len - MAX_ANSWER_TOKENS - 16))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn to play.

    Attributes:
        index: Its place in the conversation, from 0; what `AnswerOf` refers to.
        op: How it came about.
        branch: Which session of the conversation it belongs to; forks open new ones.
        parent: The branch that this one was forked from.
        endpoint: Which API.
        parts: The prompt.
        max_tokens: Longest answer.
        stream: Ask for a stream.
        lists_tool: The request offers the tool, and so has it in its prompt.
        calls_tool: The answer has to be a call of the tool.
        cancel_first: Of two requests at once, the client leaves the first in mid-stream.
        junk: Which junk goes along.
        expires: Decode is asked to retain it for a moment only.
    """

    index: int
    op: Op
    branch: int
    parent: int | None
    endpoint: Endpoint
    parts: tuple[Part, ...]
    max_tokens: int
    stream: bool = True
    lists_tool: bool = False
    calls_tool: bool = False
    cancel_first: bool = False
    junk: int | None = None
    expires: bool = False


@dataclass(slots=True)
class Script:
    """One conversation.

    Attributes:
        number: Its place in the plan.
        turns: In order.
    """

    number: int
    turns: list[Turn] = field(default_factory=list)


def prompt_tokens(parts: tuple[Part, ...], turns: list[Turn], *, lists_tool: bool) -> int:
    """A high guess of a prompt's length."""
    return (
        sum(_tokens(part, turns) for part in parts) + (TOOL_TOKENS if lists_tool else 0) + 2 * MESSAGE_TOKENS
    )


def problems(script: Script, features: Features) -> Iterator[str]:
    """Everything that makes a conversation impossible to play; empty for what `write` makes."""
    for number, turn in enumerate(script.turns):
        if turn.index != number:
            yield f"turn {number} has index {turn.index}"
        if any(not isinstance(part, Text) and part.turn >= number for part in turn.parts):
            yield f"turn {number} repeats an answer that it cannot know"
        if not turn.parts or isinstance(turn.parts[-1], AnswerOf):
            yield f"turn {number} asks nothing"
        if turn.calls_tool and not (turn.lists_tool and features.tools):
            yield f"turn {number} calls a tool that is not there"
        if prompt_tokens(turn.parts, script.turns, lists_tool=turn.lists_tool) > features.max_prompt_tokens:
            yield f"turn {number} is too long"


def _tokens(part: Part, turns: list[Turn]) -> int:
    if isinstance(part, AnswerOf):
        return turns[part.turn].max_tokens + MESSAGE_TOKENS
    return round(part.text.count(" ") * TOKENS_PER_WORD) + MESSAGE_TOKENS
