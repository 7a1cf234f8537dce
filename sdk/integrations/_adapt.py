"""Chat models that speak through the OpenAI client, such as `ChatOpenAI`, made to speak through ours."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import openai
from langchain_core.language_models.chat_models import BaseChatModel

from bidikv.client import wrap
from bidikv.integrations._answers import account
from bidikv.integrations._errors import mark, marked
from bidikv.integrations._messages import KEPT
from bidikv.integrations._scoped import Scoped
from bidikv.memory import Memory
from bidikv.retry import RetryPolicy
from bidikv.reuse import turn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Unpack

    from bidikv.client import AsyncOpenAI, OpenAI
    from bidikv.options import BidiKVOptions

ModelT = TypeVar("ModelT", bound=BaseChatModel)
ClientT = TypeVar("ClientT", "OpenAI", "AsyncOpenAI")

_CLIENTS: Final = (("root_client", "client"), ("root_async_client", "async_client"))
# Where the user has not said otherwise. Without the first a stream has no token counts; with the second's own default, a
# long wait for a first token is an error.
_DEFAULTS: Final = {"stream_usage": True, "stream_chunk_timeout": None}


def adapt(model: ModelT, **options: Unpack[BidiKVOptions]) -> ModelT:
    """A chat model like this one whose calls name their conversation, as those of `BidiKVChat` do.

    For those who keep their own `ChatOpenAI` (or another model of `langchain-openai`, or made like them): its calls belong
    to their thread and node, tool arguments go back in the model's own spelling, answers that are not streamed carry
    `response_metadata["bidikv"]`, and its client owns its retries. Such models drop reasoning; give `restore="all"` to have
    the client put it back.

    Args:
        model: Stays as it is. One that was adapted before comes back with these options.
        options: Our arguments of `bidikv.OpenAI`.

    Raises:
        ConfigurationError: An option has no such value.
        TypeError: The model has no client of the openai package.
    """
    memory = Memory()
    changes: dict[str, Any] = {}
    for root, resource in _CLIENTS:
        client = getattr(model, root, None)
        if isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
            ours = _owning(_wrapped(client, memory, options))
            changes |= {root: ours, resource: ours.chat.completions}
    if not changes:
        raise TypeError(f"{type(model).__name__} does not speak through a client of the openai package")
    known, given = type(model).model_fields, model.model_fields_set
    changes |= {name: value for name, value in _DEFAULTS.items() if name in known and name not in given}
    adapted = model.model_copy(update=changes)
    object.__setattr__(adapted, "__class__", _adapted(type(model)))
    return adapted


def is_adapted(model: object) -> bool:
    """Whether a model comes from `adapt`."""
    return isinstance(model, _Adapted)


def owning(client: ClientT) -> ClientT:
    """A client that owns its retries as a policy does, so that what it gives up on says so to retries further out."""
    return cast("ClientT", _owning(client))


def _owning(client: Any) -> Any:
    if client._bidikv.retry is not None or not client.max_retries:  # noqa: SLF001 - ours
        return client
    return wrap(client, retry=RetryPolicy(attempts=client.max_retries + 1))


def _wrapped(client: Any, memory: Memory, options: BidiKVOptions) -> Any:
    # One memory for both clients: a thread may be asked either way.
    named: Any = options if hasattr(client, "_bidikv") else {**options, "memory": memory}
    return wrap(client, **named)


@cache
def _adapted(kind: Any) -> Any:
    if issubclass(kind, _Adapted):
        return kind
    # Under the same name, so that what is serialised is the model that it was.
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Adapted, kind), names)


class _Adapted(Scoped):
    """To stand before the class of such a model: overrides of what they all have."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _get_request_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Without the names that agents give to answers: the model never wrote them."""
        payload: dict[str, Any] = super()._get_request_payload(*args, **kwargs)  # type: ignore[misc]
        messages = payload.get("messages")
        if isinstance(messages, list):
            payload["messages"] = [
                {field: value for field, value in message.items() if field != "name"}
                if isinstance(message, dict) and message.get("role") == "assistant"
                else message
                for message in messages
            ]
        return payload

    def _create_chat_result(self, response: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._create_chat_result(response, *args, **kwargs)  # type: ignore[misc]
        report = turn_of(response)
        if report is not None:
            for generation in result.generations:
                generation.message.response_metadata[KEPT] = account(report)
        return result

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with marked():
            return super()._generate(*args, **kwargs)  # type: ignore[safe-super]

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        with marked():
            return await super()._agenerate(*args, **kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from super()._stream(*args, **kwargs)
        except openai.OpenAIError as error:
            mark(error)
            raise

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        try:
            async for piece in super()._astream(*args, **kwargs):
                yield piece
        except openai.OpenAIError as error:
            mark(error)
            raise
