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
from bidikv.reuse import reported, turn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Unpack

    from bidikv.client import AsyncOpenAI, OpenAI
    from bidikv.options import BidiKVOptions
    from bidikv.reuse import TurnReport

ModelT = TypeVar("ModelT", bound=BaseChatModel)
ClientT = TypeVar("ClientT", "OpenAI", "AsyncOpenAI")

_CLIENTS: Final = (("root_client", "client"), ("root_async_client", "async_client"))
# Where the user has not said otherwise. Without the first a stream has no token counts; with the second's own default, a
# long wait for a first token is an error.
_DEFAULTS: Final = {"stream_usage": True, "stream_chunk_timeout": None}


def adapt(model: ModelT, **options: Unpack[BidiKVOptions]) -> ModelT:
    """A chat model like this one whose calls name their conversation, as those of `BidiKVChat` do.

    For those who keep their own `ChatOpenAI` (or another model of `langchain-openai`, or made like them): its calls belong
    to their thread and node, tool arguments go back in the model's own spelling, answers carry
    `response_metadata["bidikv"]`, streamed or not, and its client owns its retries. Such models drop reasoning; give `restore="all"` to have
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


class _Streamed:
    """The account of one streamed answer, on its way from the client to the piece that ends the answer."""

    def __init__(self) -> None:
        self._report: TurnReport | None = None

    def receive(self, report: TurnReport) -> None:
        """The call behind it was answered."""
        self._report = report

    def told(self, piece: Any) -> Any:
        """A piece of the answer, with the account if it ends it: of pieces that are merged, one may carry it."""
        ends = (piece.generation_info or {}).get("finish_reason") or _is_last(piece.message)
        if ends and self._report is not None:
            message = piece.message
            message.response_metadata = {**message.response_metadata, KEPT: account(self._report)}
            self._report = None
        return piece


def _is_last(message: Any) -> bool:
    return getattr(message, "chunk_position", None) == "last"


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
        pieces, streamed = super()._stream(*args, **kwargs), _Streamed()
        try:
            while True:
                with reported(streamed.receive):
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield streamed.told(piece)
        except openai.OpenAIError as error:
            mark(error)
            raise
        finally:
            pieces.close()  # type: ignore[attr-defined] # a generator

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        pieces, streamed = super()._astream(*args, **kwargs), _Streamed()
        try:
            while True:
                with reported(streamed.receive):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield streamed.told(piece)
        except openai.OpenAIError as error:
            mark(error)
            raise
        finally:
            await pieces.aclose()  # type: ignore[attr-defined] # a generator
