"""Tools of a graph: while one runs, decode protects the conversation that waits for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from bidikv.integrations._threads import waiting_conversation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from langgraph.prebuilt.tool_node import ToolCallRequest


def wrap_tool_call(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Any]) -> Any:
    """Run a tool; for a graph of one's own: `ToolNode(tools, wrap_tool_call=..., awrap_tool_call=...)`."""
    with _running(request):
        return execute(request)


async def awrap_tool_call(
    request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]
) -> Any:
    """Run a tool, from a coroutine; see `wrap_tool_call`."""
    async with _arunning(request):
        return await execute(request)


def _running(request: ToolCallRequest) -> AbstractContextManager[Any]:
    waiting = waiting_conversation()
    return nullcontext() if waiting is None else waiting.tool(request.tool_call["name"])


def _arunning(request: ToolCallRequest) -> AbstractAsyncContextManager[Any]:
    waiting = waiting_conversation()
    return nullcontext() if waiting is None else waiting.tool(request.tool_call["name"])
