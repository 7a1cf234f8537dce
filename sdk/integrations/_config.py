"""The conversation that a LangChain config stands for."""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from langchain_core.runnables.config import ensure_config

from bidikv.conversations import Conversation, current_conversation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from langchain_core.runnables import RunnableConfig

# LangGraph appends the id of the running task to each node's name, and that changes with every step.
_TASK_ID: Final = re.compile(r":[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_scoped: ContextVar[RunnableConfig | None] = ContextVar("bidikv_langchain_config", default=None)


@contextmanager
def scope(config: RunnableConfig | None) -> Iterator[None]:
    """Let `call_config` see a config that LangChain does not hand down to a chat model.

    Not to be held across a `yield`: the caller of a generator would see it too.
    """
    token = _scoped.set(ensure_config(config))
    try:
        yield
    finally:
        _scoped.reset(token)


def call_config() -> RunnableConfig:
    """The config of the running model call, or of the graph node around it."""
    return _scoped.get() or ensure_config()


def node_path(checkpoint_ns: object) -> str:
    """Where in a graph a call comes from, the same at every step: `agent`, `team|planner`."""
    return _TASK_ID.sub("", checkpoint_ns) if isinstance(checkpoint_ns, str) else ""


def ambient_conversation() -> Conversation | None:
    """The conversation of the surrounding run; None outside of one, or if it has no thread."""
    return conversation_of(call_config())


def call_conversation(chosen: Conversation | None) -> Conversation | None:
    """The conversation of a chat model's call: the model's own, else the current one, else the run's.

    Calls that middleware makes for itself (summaries, tool selection) get one beside it, so that they do not pass for
    its next turn.
    """
    config = call_config()
    conversation = chosen or current_conversation() or _of_thread(config)
    return _aside(conversation, config.get("metadata") or {})


def conversation_of(config: RunnableConfig) -> Conversation | None:
    """The conversation that a config's thread and node stand for; None without a thread."""
    return _aside(_of_thread(config), config.get("metadata") or {})


def _of_thread(config: RunnableConfig) -> Conversation | None:
    configurable, metadata = config.get("configurable") or {}, config.get("metadata") or {}
    thread = configurable.get("thread_id")
    if thread is None:  # the two can disagree; the checkpointer goes by the former
        thread = metadata.get("thread_id")
    if thread is None:
        return None
    path = node_path(configurable.get("checkpoint_ns"))
    above, _, name = path.rpartition("|")
    conversation = Conversation(("langgraph", str(thread), path), agent=name or None)
    if above:
        conversation.parent = Conversation(("langgraph", str(thread), above)).id
    return conversation


def _aside(conversation: Conversation | None, metadata: Mapping[str, Any]) -> Conversation | None:
    source = metadata.get("lc_source") or metadata.get("lc_internal_call")
    if conversation is None or not source:
        return conversation
    return conversation.child(source if isinstance(source, str) else "internal", kind="aux", retain_s=0.0)
