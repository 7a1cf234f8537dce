"""Clients that tell a bidikv router which conversation a call belongs to, and show what was reused.

Everything is loaded at first use: `import bidikv` costs a few standard library modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bidikv._version import __version__
    from bidikv.client import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI, wrap
    from bidikv.conversations import Conversation, conversation, current_conversation, run_in
    from bidikv.drift import Drift
    from bidikv.errors import (
        BidiKVError,
        ConfigurationError,
        DriftError,
        DriftWarning,
        MissingIntegrationError,
        RetriesExhausted,
    )
    from bidikv.explain import Explanation
    from bidikv.fidelity import message_of
    from bidikv.headers import ReuseHeader, TurnHeader
    from bidikv.ids import session_id
    from bidikv.reports import ReuseReport
    from bidikv.retry import RetryPolicy, is_transient
    from bidikv.reuse import TurnReport, reuse_of, turn_of

__all__ = [
    "AsyncAzureOpenAI",
    "AsyncOpenAI",
    "AzureOpenAI",
    "BidiKVError",
    "ConfigurationError",
    "Conversation",
    "Drift",
    "DriftError",
    "DriftWarning",
    "Explanation",
    "MissingIntegrationError",
    "OpenAI",
    "RetriesExhausted",
    "RetryPolicy",
    "ReuseHeader",
    "ReuseReport",
    "TurnHeader",
    "TurnReport",
    "__version__",
    "conversation",
    "current_conversation",
    "is_transient",
    "message_of",
    "reuse_of",
    "run_in",
    "session_id",
    "turn_of",
    "wrap",
]

_HOMES: Final = {
    "AsyncAzureOpenAI": "client",
    "AsyncOpenAI": "client",
    "AzureOpenAI": "client",
    "BidiKVError": "errors",
    "ConfigurationError": "errors",
    "Conversation": "conversations",
    "Drift": "drift",
    "DriftError": "errors",
    "DriftWarning": "errors",
    "Explanation": "explain",
    "MissingIntegrationError": "errors",
    "OpenAI": "client",
    "RetriesExhausted": "errors",
    "RetryPolicy": "retry",
    "ReuseHeader": "headers",
    "ReuseReport": "reports",
    "TurnHeader": "headers",
    "TurnReport": "reuse",
    "__version__": "_version",
    "conversation": "conversations",
    "current_conversation": "conversations",
    "is_transient": "retry",
    "message_of": "fidelity",
    "reuse_of": "reuse",
    "run_in": "conversations",
    "session_id": "ids",
    "turn_of": "reuse",
    "wrap": "client",
}


def __getattr__(name: str) -> object:
    """Load an exported name from the module that defines it, once."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
