"""`BidiKVChat`: the chat model for LangGraph agents behind a bidikv router."""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - pydantic reads the fields' types
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from bidikv.errors import ConfigurationError, MissingIntegrationError

try:
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.utils.function_calling import convert_to_openai_tool
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("langchain_core"):
        raise
    raise MissingIntegrationError("langgraph", "langchain-core") from error

import openai
from pydantic import Field, InstanceOf, PrivateAttr, SecretStr

from bidikv.client import AsyncOpenAI, OpenAI
from bidikv.conversations import Conversation  # noqa: TC001 - as above
from bidikv.drift import Drift  # noqa: TC001 - as above
from bidikv.headers import READBACK_HEADER
from bidikv.integrations import _structured
from bidikv.integrations._adapt import adapt, owning
from bidikv.integrations._answers import AnswerChunks, to_result
from bidikv.integrations._errors import mark, marked
from bidikv.integrations._messages import to_wire
from bidikv.integrations._scoped import Scoped
from bidikv.integrations._threads import aclose_thread, call_conversation, close_thread, thread_report
from bidikv.integrations._tools import awrap_tool_call, wrap_tool_call
from bidikv.memory import Memory, Restore
from bidikv.retry import RetryPolicy  # noqa: TC001 - as above
from bidikv.reuse import turn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool

__all__ = [
    "BidiKVChat",
    "aclose_thread",
    "adapt",
    "awrap_tool_call",
    "close_thread",
    "thread_report",
    "wrap_tool_call",
]

_NO_KEY = "none"  # routers rarely ask for one; the environment's key belongs to another service


class BidiKVChat(Scoped, BaseChatModel):
    """Chat completions with a conversation per LangGraph thread and node, and the history sent back unchanged.

    `response_metadata["bidikv"]` of each answer says what was reused. What the model wrote (tool arguments,
    reasoning) is kept in `additional_kwargs["bidikv"]` and sent back byte for byte, unless it was edited since.

    A graph without a checkpointer has no thread: name its conversation with `bidikv.conversation`, or the router has
    only the messages to go by.
    """

    model: str
    """Name under which the engines serve the model."""
    base_url: str | None = None
    """The router, with `/v1`."""
    api_key: SecretStr | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    """Longest answer, in tokens."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Request fields that the OpenAI API does not have."""
    extra_headers: dict[str, str] = Field(default_factory=dict)
    stream_usage: bool = True
    """Ask for token counts at the end of a stream."""
    timeout: float | None = None
    """Seconds for a whole call; None leaves it to the OpenAI client."""
    max_retries: int = 2
    """How often a call that fails before its answer begins is tried again. What it then fails with is not tried again by
    LangGraph's or LangChain's own retries; 0 leaves all retries to them."""
    retry: InstanceOf[RetryPolicy] | None = None
    """When and how often a call is tried again, in place of `max_retries`."""
    readback: bool = True
    """False serves every call without reuse from decode, for comparisons."""
    keep_reasoning: bool = True
    """Send the model's reasoning back with its answers."""
    on_drift: Literal["ignore", "warn", "raise"] | Callable[[Drift], None] = "ignore"
    """What to do when a thread's history changes that should have stayed; see `bidikv.OpenAI`."""
    restore: Restore = "spelling"
    """How far a history is put back into the model's own spelling; see `bidikv.OpenAI`."""
    secret: bytes | None = Field(default=None, exclude=True, repr=False)
    """Keys the ids of threads, so that nobody can try out names; 64 bytes at most."""
    conversation: Conversation | str | None = Field(default=None, exclude=True)
    """Whose turns these calls are, whatever thread they run in; text is a key as in `bidikv.conversation`."""
    client: OpenAI | None = Field(default=None, exclude=True)
    """Used for synchronous calls in place of one made from the fields above."""
    async_client: AsyncOpenAI | None = Field(default=None, exclude=True)

    # One for both clients: a thread may be asked either way.
    _memory: Memory = PrivateAttr(default_factory=Memory)
    # With the options they were made from: `model_copy(update=...)` takes private attributes along.
    _own_client: tuple[dict[str, Any], OpenAI] | None = PrivateAttr(default=None)
    _own_async_client: tuple[dict[str, Any], AsyncOpenAI] | None = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "bidikv-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "base_url": self.base_url,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "extra_body": self.extra_body,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"], params["ls_model_name"] = "bidikv", kwargs.get("model") or self.model
        return params

    def _client_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "api_key": self.api_key.get_secret_value() if self.api_key else _NO_KEY,
            "base_url": self.base_url,
            "max_retries": self.max_retries if self.retry is None else 0,
            "retry": self.retry,
            "on_drift": self.on_drift,
            "restore": self.restore,
            "secret": self.secret,
            "memory": self._memory,
        }
        return options if self.timeout is None else {**options, "timeout": self.timeout}

    def _sync(self) -> OpenAI:
        options = {"client": self.client} if self.client is not None else self._client_options()
        if self._own_client is None or self._own_client[0] != options:
            self._own_client = options, owning(self.client or OpenAI(**options))
        return self._own_client[1]

    def _async(self) -> AsyncOpenAI:
        options = {"client": self.async_client} if self.async_client is not None else self._client_options()
        if self._own_async_client is None or self._own_async_client[0] != options:
            self._own_async_client = options, owning(self.async_client or AsyncOpenAI(**options))
        return self._own_async_client[1]

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Arguments of `chat.completions.create`; those given with the call win over the model's own."""
        headers = {} if self.readback else {READBACK_HEADER: "off"}
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "stop": stop}
        merged = {
            "model": self.model,
            "messages": to_wire(messages, reasoning=self.keep_reasoning),
            **{name: value for name, value in own.items() if value is not None},
            **given,
            "extra_headers": {**headers, **self.extra_headers, **(given.get("extra_headers") or {})},
            "extra_body": {**self.extra_body, **(given.get("extra_body") or {})},
        }
        merged.pop("stream", None)
        return merged

    def _stream_request(self, request: dict[str, Any]) -> dict[str, Any]:
        usage = {"stream_options": {"include_usage": True}} if self.stream_usage else {}
        return {**usage, **request, "stream": True}

    def _sending(self, request: dict[str, Any], client: OpenAI | AsyncOpenAI) -> ExitStack:
        """Make this call's conversation current while the request is being made, and mark what it fails with."""
        own = (
            client.conversation(self.conversation)
            if isinstance(self.conversation, str)
            else self.conversation
        )
        conversation = call_conversation(own, request["messages"], secret=client._bidikv.secret)  # noqa: SLF001 - ours
        stack = ExitStack()
        stack.enter_context(marked())
        if conversation is not None:
            stack.enter_context(conversation)
        return stack

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        client, request = self._sync(), self._request(messages, stop, kwargs)
        with self._sending(request, client):
            completion = client.chat.completions.create(**request)
        return to_result(completion, turn_of(completion))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        client, request = self._async(), self._request(messages, stop, kwargs)
        with self._sending(request, client):
            completion = await client.chat.completions.create(**request)
        return to_result(completion, turn_of(completion))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        client, request = self._sync(), self._stream_request(self._request(messages, stop, kwargs))
        with self._sending(request, client):
            stream = client.chat.completions.create(**request)
        answer = AnswerChunks()
        with stream:
            try:
                for chunk in stream:
                    if (piece := answer.convert(chunk)) is not None:
                        if run_manager is not None:
                            run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece
            except openai.OpenAIError as error:
                mark(error)
                raise
        yield answer.last(turn_of(stream))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        client, request = self._async(), self._stream_request(self._request(messages, stop, kwargs))
        with self._sending(request, client):
            stream = await client.chat.completions.create(**request)
        answer = AnswerChunks()
        async with stream:
            try:
                async for chunk in stream:
                    if (piece := answer.convert(chunk)) is not None:
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece
            except openai.OpenAIError as error:
                mark(error)
                raise
        yield answer.last(turn_of(stream))

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools, in the order given: tools stand early in the prompt, so their order is part of the prefix.

        Args:
            tools: Whatever LangChain takes for a tool.
            tool_choice: `auto`, `none`, `required` (also `any` or True), a tool's name, or the API's own form.
            strict: Passed on with each tool.
            kwargs: Further request fields.

        Raises:
            ConfigurationError: `tool_choice` names a tool that is not offered.
        """
        offered = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice is not None and tool_choice is not False:
            kwargs["tool_choice"] = _tool_choice(tool_choice, [tool["function"]["name"] for tool in offered])
        return self.bind(tools=offered, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Constrain answers to a schema, by the engine's constrained decoding.

        Args:
            schema: A pydantic class (answers are instances), or a TypedDict or JSON schema (answers are dicts).
            include_raw: Return {"raw", "parsed", "parsing_error"} and do not raise on a bad answer.
            method: `json_schema` constrains the answer's text, `function_calling` makes it call one tool.
            strict: Passed on with the schema.
            kwargs: Further request fields.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        model = self.bind(response_format=_structured.response_format(schema, strict=strict), **kwargs)
        parser = _structured.parser_for(schema)
        return _structured.with_raw(model, parser) if include_raw else model | parser


def _tool_choice(choice: str | dict[str, Any] | bool, names: list[str]) -> str | dict[str, Any]:  # noqa: FBT001
    if isinstance(choice, dict):
        return choice
    if choice in {True, "any", "required"}:
        if len(names) != 1:
            return "required"
        choice = names[0]
    if choice in {"auto", "none"}:
        return str(choice)
    if choice not in names:
        raise ConfigurationError(
            f"tool_choice names {choice!r}, but the tools are {', '.join(names) or 'none'}"
        )
    return {"type": "function", "function": {"name": choice}}
