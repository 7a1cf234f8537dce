"""Middleware for LangChain's `create_agent`, whichever chat model it has."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

from bidikv.errors import ConfigurationError, MissingIntegrationError

try:
    from langchain.agents.middleware import AgentMiddleware
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("langchain"):
        raise
    raise MissingIntegrationError("langchain") from error

from bidikv.integrations._adapt import adapt, is_adapted
from bidikv.integrations._tools import awrap_tool_call, wrap_tool_call
from bidikv.integrations.langgraph import BidiKVChat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Unpack

    from langchain.agents.middleware import ModelRequest, ModelResponse, ToolCallRequest
    from langchain_core.language_models.chat_models import BaseChatModel

    from bidikv.options import BidiKVOptions

_ADAPTED = 16
"""Models kept: an agent has one, and perhaps some to fall back to."""


if TYPE_CHECKING:
    _Base = AgentMiddleware[Any, Any, Any]
else:  # it has another number of parameters in other versions
    _Base = AgentMiddleware


class BidiKVMiddleware(_Base):
    """Names the conversation of each call of an agent's model, and tells decode how long its tools take.

    `create_agent(ChatOpenAI(...), tools, middleware=[..., BidiKVMiddleware()])`. Put it last, so that it sees the model that
    other middleware has chosen. A `BidiKVChat` names its conversations itself; for that one it is about tools only.

    Args:
        unsupported: What to do about a model that does not speak through the openai package: `ignore` it, `warn` once, or
            `raise` a TypeError.
        options: Our arguments of `bidikv.OpenAI`, for the models that it adapts.

    Raises:
        ConfigurationError: An argument has no such value.
    """

    def __init__(
        self,
        *,
        unsupported: Literal["ignore", "warn", "raise"] = "warn",
        **options: Unpack[BidiKVOptions],
    ) -> None:
        super().__init__()
        if unsupported not in {"ignore", "warn", "raise"}:
            raise ConfigurationError(f"unsupported is one of ignore, warn, raise, not {unsupported!r}")
        self._unsupported = unsupported
        self._options = options
        # With the model that it was made from, so that its id stays its own.
        self._adapted: dict[int, tuple[BaseChatModel, BaseChatModel]] = {}

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model as part of its conversation."""
        return handler(request.override(model=self._fitting(request.model)))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """Call the model as part of its conversation."""
        return await handler(request.override(model=self._fitting(request.model)))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Run a tool, and let decode protect the conversation meanwhile."""
        return wrap_tool_call(request, handler)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """Run a tool, and let decode protect the conversation meanwhile."""
        return await awrap_tool_call(request, handler)

    def _fitting(self, model: BaseChatModel) -> BaseChatModel:
        if isinstance(model, BidiKVChat) or is_adapted(model):
            return model
        if (known := self._adapted.get(id(model))) is not None:
            return known[1]
        try:
            fitting = adapt(model, **self._options)
        except TypeError as error:
            if self._unsupported == "raise":
                raise
            if self._unsupported == "warn":
                warnings.warn(f"no conversation for the router: {error}", stacklevel=2)
            fitting = model
        while len(self._adapted) >= _ADAPTED:
            del self._adapted[next(iter(self._adapted))]
        self._adapted[id(model)] = model, fitting
        return fitting
