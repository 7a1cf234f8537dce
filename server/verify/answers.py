"""What an engine answered, put together from a stream's chunks or a whole body. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv.headers import ReuseHeader


@dataclass(frozen=True, slots=True)
class Position:
    """One generated token with its alternatives, from a request for log probabilities.

    Attributes:
        token: What was generated: `token_id:N`, or text where the engine tells no ids.
        alternatives: Log probabilities by token, the generated one among them.
    """

    token: str
    alternatives: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        text: What it says.
        arguments: Arguments of its tool call, as generated; None without a call.
        token_ids: What was generated; empty if the engine does not tell.
        finish_reason: Why it ended.
        reuse: The router's account.
        positions: Log probabilities, where they were asked for.
    """

    text: str
    arguments: str | None = None
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    reuse: ReuseHeader | None = None
    positions: tuple[Position, ...] = ()

    def said(self) -> str:
        """All of it as text."""
        return self.text if self.arguments is None else f"{self.text}{self.arguments}"


@dataclass(slots=True)
class AnswerBuilder:
    """Takes chunks of a stream, or one whole body, in any mixture of the chat and the completions API."""

    text: str = ""
    arguments: str | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    positions: list[Position] = field(default_factory=list)

    def add(self, body: Mapping[str, Any]) -> None:
        """Take the next chunk.

        Raises:
            ValueError: It is not of the API's shape.
        """
        try:
            for choice in body.get("choices") or ():
                self._add_choice(choice)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not an answer of the OpenAI API: {error!r}") from error

    def build(self, reuse: ReuseHeader | None) -> Answer:
        """The answer so far."""
        return Answer(
            self.text, self.arguments, tuple(self.token_ids), self.finish_reason, reuse, tuple(self.positions)
        )

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        said = choice.get("delta") or choice.get("message") or {}
        self.text += choice.get("text") or said.get("content") or ""
        for call in said.get("tool_calls") or ():
            self.arguments = (self.arguments or "") + (call["function"].get("arguments") or "")
        self.token_ids += choice.get("token_ids") or ()
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.positions += _positions(choice.get("logprobs") or {})


def _positions(logprobs: Mapping[str, Any]) -> list[Position]:
    content = logprobs.get("content")
    if content:
        return [_chat_position(entry) for entry in content]
    tokens, tops = logprobs.get("tokens") or (), logprobs.get("top_logprobs") or ()
    return [Position(token, dict(top or {})) for token, top in zip(tokens, tops, strict=True)]


def _chat_position(entry: Mapping[str, Any]) -> Position:
    alternatives = {top["token"]: float(top["logprob"]) for top in entry.get("top_logprobs") or ()}
    return Position(entry["token"], {**alternatives, entry["token"]: float(entry["logprob"])})
