"""Errors of a call, marked for whoever retries further out: LangGraph's policies and LangChain's middleware.

An error stays what the OpenAI client raised. It is also LangChain's error for the same thing, where LangChain has one, and
where another try would not help it is a RuntimeError too, which LangGraph's default policy leaves alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import openai
from langchain_core import exceptions

from bidikv.errors import RetriesExhausted
from bidikv.retry import is_transient

if TYPE_CHECKING:
    from collections.abc import Iterator

# The first that fits. LangChain has had these since its core 1.7; before, there is none.
_LANGCHAINS: Final[tuple[tuple[type[openai.OpenAIError], str], ...]] = (
    (openai.APITimeoutError, "ModelTimeoutError"),
    (openai.APIConnectionError, "ModelConnectionError"),
    (openai.AuthenticationError, "ModelAuthenticationError"),
    (openai.PermissionDeniedError, "ModelPermissionDeniedError"),
    (openai.NotFoundError, "ModelNotFoundError"),
    (openai.RateLimitError, "ModelRateLimitError"),
    (openai.BadRequestError, "ModelInvalidRequestError"),
    (openai.UnprocessableEntityError, "ModelInvalidRequestError"),
    (openai.APIError, "ModelAPIError"),
)
_TOO_LONG: Final = ("context_length_exceeded", "maximum context length")


@contextmanager
def marked() -> Iterator[None]:
    """Let a call's error say what it is and whether another try may help. Not to be held across a `yield`."""
    try:
        yield
    except openai.OpenAIError as error:
        mark(error)
        raise


def mark(error: openai.OpenAIError) -> None:
    """Let an error say what it is and whether another try may help."""
    # Integrations raise errors of their own from the client's.
    given_up = isinstance(error, RetriesExhausted) or isinstance(error.__cause__, RetriesExhausted)
    # An answer that breaks off has no status. Nobody has tried it again, so somebody may.
    again = not given_up and (is_transient(error) or type(error) is openai.APIError)
    kind: Any = type(error)
    error.__class__ = _marked(kind, _langchains(error), final=not again)
    error.is_retryable = again  # type: ignore[attr-defined] # LangChain's name for it


def _langchains(error: openai.OpenAIError) -> str | None:
    if isinstance(error, openai.BadRequestError) and any(
        sign in f"{error.code} {error}" for sign in _TOO_LONG
    ):
        return "ContextOverflowError"
    return next((name for kind, name in _LANGCHAINS if isinstance(error, kind)), None)


@cache
def _marked(kind: Any, name: str | None, *, final: bool) -> Any:
    wanted = [getattr(exceptions, name, None) if name else None, RuntimeError if final else None]
    more = tuple(base for base in wanted if base is not None and not issubclass(kind, base))
    if not more:
        return kind
    return type(kind.__name__, (kind, *more), {"__module__": kind.__module__, "__doc__": kind.__doc__})
