"""Adapters for agent frameworks; each is loaded at first use and names the extra that brings its framework."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bidikv.integrations._adapt import adapt
    from bidikv.integrations.langgraph import BidiKVChat, aclose_thread, close_thread, thread_report
    from bidikv.integrations.middleware import BidiKVMiddleware

__all__ = ["BidiKVChat", "BidiKVMiddleware", "aclose_thread", "adapt", "close_thread", "thread_report"]

_HOMES: Final = {
    "BidiKVChat": "langgraph",
    "BidiKVMiddleware": "middleware",
    "aclose_thread": "langgraph",
    "adapt": "langgraph",
    "close_thread": "langgraph",
    "thread_report": "langgraph",
}


def __getattr__(name: str) -> object:
    """Load an exported name from the module that defines it, once."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
