"""Chat completions as LangChain messages, with the model's own spelling kept beside the parsed form.

Pure: reads parsed responses of the OpenAI client, does no input or output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    InvalidToolCall,
    ToolCall,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from bidikv.integrations._messages import KEPT, parse_arguments

if TYPE_CHECKING:
    from langchain_core.messages import ToolCallChunk
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from bidikv.reuse import TurnReport


def to_result(completion: ChatCompletion, report: TurnReport | None) -> ChatResult:
    """Convert a whole answer."""
    return ChatResult(
        generations=[
            ChatGeneration(
                message=_message(choice.message, completion, choice.finish_reason, report),
                generation_info={"finish_reason": choice.finish_reason},
            )
            for choice in completion.choices
        ],
        llm_output={"model_name": completion.model},
    )


def _message(
    answer: Any, completion: ChatCompletion, finish_reason: str, report: TurnReport | None
) -> AIMessage:
    raw_by_id: dict[str, str] = {}
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in answer.tool_calls or ():
        raw = call.function.arguments
        raw_by_id[call.id] = raw
        args = parse_arguments(raw)
        if args is None:
            error = "the arguments are not a JSON object"
            invalid.append(
                InvalidToolCall(
                    type="invalid_tool_call", id=call.id, name=call.function.name, args=raw, error=error
                )
            )
        else:
            calls.append(ToolCall(type="tool_call", id=call.id, name=call.function.name, args=args))
    kept: dict[str, Any] = {}
    if reasoning := _reasoning(answer):
        kept["reasoning"] = reasoning
    if raw_by_id:
        kept["args"] = raw_by_id
    if answer.content is None:
        kept["null"] = True
    return AIMessage(
        content=answer.content or "",
        additional_kwargs={KEPT: kept} if kept else {},
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=_usage(completion.usage, report),
        response_metadata=_metadata(completion.model, finish_reason, report),
    )


class AnswerChunks:
    """Converts one streamed answer. Stateful: later deltas of a tool call name it by index only."""

    def __init__(self) -> None:
        self._call_ids: dict[int, str] = {}
        self._usage: Any = None
        self._model = ""
        self._finish_reason: str | None = None
        self._has_text = False

    def convert(self, chunk: ChatCompletionChunk) -> ChatGenerationChunk | None:
        """Convert a chunk; None if it holds nothing to show. Usage and finish reason wait for `last`."""
        self._usage = chunk.usage or self._usage
        self._model = chunk.model or self._model
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        self._finish_reason = choice.finish_reason or self._finish_reason
        kept: dict[str, Any] = {}
        if reasoning := _reasoning(choice.delta):
            kept["reasoning"] = reasoning
        calls = [self._call(delta, kept) for delta in choice.delta.tool_calls or ()]
        text = choice.delta.content or ""
        self._has_text = self._has_text or bool(text)
        if not text and not calls and not kept:
            return None
        message = AIMessageChunk(
            content=text, additional_kwargs={KEPT: kept} if kept else {}, tool_call_chunks=calls
        )
        return ChatGenerationChunk(message=message)

    def _call(self, delta: Any, kept: dict[str, Any]) -> ToolCallChunk:
        # Merging concatenates text, so each id and name is passed on once however often a server repeats it.
        first = delta.index not in self._call_ids
        if first:
            self._call_ids[delta.index] = delta.id or ""
        arguments = (delta.function and delta.function.arguments) or ""
        call_id = self._call_ids[delta.index]
        if call_id:
            raw = kept.setdefault("args", {})
            raw[call_id] = raw.get(call_id, "") + arguments
        name = delta.function.name if first and delta.function else None
        return tool_call_chunk(
            name=name, args=arguments, id=(call_id or None) if first else None, index=delta.index
        )

    def last(self, report: TurnReport | None) -> ChatGenerationChunk:
        """The closing chunk: all that may be said only once, because merging adds numbers up."""
        # A stream opens with an empty text either way; an answer that is nothing but tool calls has none.
        null = bool(self._call_ids) and not self._has_text
        message = AIMessageChunk(
            content="",
            additional_kwargs={KEPT: {"null": True}} if null else {},
            usage_metadata=_usage(self._usage, report),
            response_metadata=_metadata(self._model, self._finish_reason, report),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message, generation_info={"finish_reason": self._finish_reason})


def _reasoning(answer: Any) -> str | None:
    """Reasoning text, under vLLM's name for it or its older one."""
    return getattr(answer, "reasoning", None) or getattr(answer, "reasoning_content", None)


def _metadata(model: str, finish_reason: str | None, report: TurnReport | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "model_name": model,
        "model_provider": "bidikv",
        "finish_reason": finish_reason,
    }
    if report is not None:
        metadata[KEPT] = account(report)
    return metadata


def account(report: TurnReport) -> dict[str, Any]:
    """What `response_metadata["bidikv"]` says of a turn. Counts are prompt tokens."""
    return {
        "reason": report.reason,
        "prompt_tokens": report.prompt_tokens,
        "remote_tokens": report.remote_tokens,
        "local_tokens": report.local_tokens,
        "computed_tokens": report.computed_tokens,
        "ttft_s": report.ttft_s,
        "session": report.session,
        "drift": None if report.drift is None else report.drift.kind,
    }


def _usage(usage: Any, report: TurnReport | None) -> UsageMetadata | None:
    if usage is None:
        return None
    metadata = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
    cached = _cached_tokens(usage, report)
    if cached is not None:
        metadata["input_token_details"] = {"cache_read": cached}
    return metadata


def _cached_tokens(usage: Any, report: TurnReport | None) -> int | None:
    """Prompt tokens that nobody computed for this turn.

    The router's account goes first: the usage is decode's, for whom all that prefill sent counts as cached.
    """
    if report is not None and report.remote_tokens is not None and report.local_tokens is not None:
        return report.remote_tokens + report.local_tokens
    details = getattr(usage, "prompt_tokens_details", None)
    return getattr(details, "cached_tokens", None)
