"""What a LangChain config says of a call: which thread, which node of a graph, and whether it is one on the side. Pure."""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from langchain_core.runnables.config import ensure_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from langchain_core.runnables import RunnableConfig

# LangGraph appends the id of the running task to each node's name, and that changes with every step.
_TASK_ID: Final = re.compile(r":[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HOOK: Final = re.compile(r"(?P<middleware>[^|]+)\.(?:before|after)_(?:agent|model)$")
_SENT: Final = "__pregel_push"
"""How LangGraph marks a task that was sent (`Send`), of which one node may run many at once."""

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a thread a call comes from.

    Attributes:
        thread: The thread.
        path: Nodes from the outermost graph inwards, without the ids of their tasks.
        graph: Namespace of the graph that the node belongs to, with the ids: one run of it.
        agent: Name of the agent that the node belongs to, where it has one.
        side: What middleware calls its own call (a summary, a selection of tools); None for a turn of the agent.
        one_of_many: Others of this path may run at once, or have run: the node was sent, or its graph is a run of its own.
    """

    thread: str
    path: str
    graph: str
    agent: str | None
    side: str | None
    one_of_many: bool

    @property
    def label(self) -> str | None:
        """For the router's logs."""
        return self.agent or self.path.rpartition("|")[2] or None

    @property
    def graph_above(self) -> str | None:
        """Namespace of the graph around this one; None for an outermost one."""
        return self.graph.rpartition("|")[0] if self.graph else None


def place_of(config: RunnableConfig) -> Place | None:
    """The place that a config stands for; None without a thread."""
    configurable, metadata = config.get("configurable") or {}, config.get("metadata") or {}
    thread = configurable.get("thread_id")
    if thread is None:  # the two can disagree; the checkpointer goes by the former
        thread = metadata.get("thread_id")
    if thread is None:
        return None
    namespace = configurable.get("checkpoint_ns")
    namespace = namespace if isinstance(namespace, str) else ""
    graph = namespace.rpartition("|")[0]
    agent, route = metadata.get("lc_agent_name"), metadata.get("langgraph_path")
    sent = isinstance(route, tuple | list) and _SENT in route
    return Place(
        thread=str(thread),
        path=node_path(namespace),
        graph=graph,
        agent=agent if isinstance(agent, str) and agent else None,
        side=side_of(config),
        one_of_many=sent or _TASK_ID.search(graph) is not None,
    )


def side_of(config: RunnableConfig) -> str | None:
    """What middleware calls the call that it makes for itself; None for any other."""
    metadata = config.get("metadata") or {}
    source = metadata.get("lc_source")
    if isinstance(source, str) and source:
        return source
    # The other mark's value is a secret of the process.
    if source or metadata.get("lc_internal_call"):
        return "internal"
    # Older middleware marks nothing, but its hooks run in nodes of their own.
    hook = _HOOK.search(node_path((config.get("configurable") or {}).get("checkpoint_ns")))
    return hook["middleware"] if hook else None
