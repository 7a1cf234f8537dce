"""Clients that tell a bidikv router which conversation a call belongs to, and show what was reused.

Everything is loaded at first use: `import bidikv` costs a few standard library modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bidikv._version import __version__
    from bidikv.client import AsyncOpenAI, OpenAI
    from bidikv.conversations import Conversation, conversation, current_conversation, session_id
    from bidikv.errors import BidiKVError, ConfigurationError, MissingIntegrationError
    from bidikv.headers import ReuseHeader, TurnHeader
    from bidikv.reuse import TurnReport, reuse_of, turn_of

__all__ = [
    "AsyncOpenAI",
    "BidiKVError",
    "ConfigurationError",
    "Conversation",
    "MissingIntegrationError",
    "OpenAI",
    "ReuseHeader",
    "TurnHeader",
    "TurnReport",
    "__version__",
    "conversation",
    "current_conversation",
    "reuse_of",
    "session_id",
    "turn_of",
]

_HOMES: Final = {
    "AsyncOpenAI": "client",
    "BidiKVError": "errors",
    "ConfigurationError": "errors",
    "Conversation": "conversations",
    "MissingIntegrationError": "errors",
    "OpenAI": "client",
    "ReuseHeader": "headers",
    "TurnHeader": "headers",
    "TurnReport": "reuse",
    "__version__": "_version",
    "conversation": "conversations",
    "current_conversation": "conversations",
    "reuse_of": "reuse",
    "session_id": "conversations",
    "turn_of": "reuse",
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
