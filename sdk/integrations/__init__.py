"""Adapters for agent frameworks; each is loaded at first use and names the extra that brings its framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bidikv.integrations.langgraph import BidiKVChat

__all__ = ["BidiKVChat"]


def __getattr__(name: str) -> object:
    if name != "BidiKVChat":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bidikv.integrations import langgraph  # noqa: PLC0415 - the framework is loaded when asked for

    globals()[name] = langgraph.BidiKVChat
    return langgraph.BidiKVChat
