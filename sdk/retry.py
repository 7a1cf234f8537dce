"""One owner of retries: a policy in place of the OpenAI client's own, by tenacity."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import openai
import tenacity

from bidikv.errors import ConfigurationError, RetriesExhausted
from bidikv.hints import require_seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

P = ParamSpec("P")
T = TypeVar("T")

_TRANSIENT: Final = frozenset({408, 429})


def is_transient(error: BaseException) -> bool:
    """Whether another try may go better: no connection, a timeout, 408, 429 or 5xx, or as the server says (`x-should-retry`).

    False for errors that a `RetryPolicy` has given up on, so that this is also what a retry further out should go by:
    `langgraph.types.RetryPolicy(retry_on=bidikv.is_transient)`.
    """
    if isinstance(error, RetriesExhausted):
        return False
    if isinstance(error, openai.APIConnectionError):
        return True
    if not isinstance(error, openai.APIStatusError):
        return False
    said = error.response.headers.get("x-should-retry")
    if said in {"true", "false"}:
        return bool(said == "true")
    return error.status_code in _TRANSIENT or error.status_code >= 500


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a call is tried again, and how long after. Give it to a client; the client's own retries are off then.

    A call is tried again until its answer begins. A stream that breaks later raises what it broke with. Waits are as long
    as the server asks for (`retry-after-ms`, `retry-after`), else they double from `first_wait_s`, a quarter of them by
    chance. A call whose next try would begin after the budget fails at once.

    Attributes:
        attempts: How often at most, the first included.
        budget_s: Seconds from the first try within which the last one has to begin.
        first_wait_s: Seconds before the second try.
        max_wait_s: The longest wait in seconds that is not the server's own.
        retry_on: Whether another try may go better.
    """

    attempts: int = 4
    budget_s: float = 60.0
    first_wait_s: float = 0.5
    max_wait_s: float = 8.0
    retry_on: Callable[[BaseException], bool] = is_transient

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything.

        Raises:
            ConfigurationError: `attempts` is below one, or a duration is none.
        """
        if self.attempts < 1:
            raise ConfigurationError(f"attempts is at least 1, not {self.attempts}")
        for name in ("budget_s", "first_wait_s", "max_wait_s"):
            require_seconds(name, getattr(self, name))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call until it returns.

        Args:
            function: What to call.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            openai.OpenAIError: What the last try failed with; also a `RetriesExhausted` if it was not the first one.
        """
        try:
            return tenacity.Retrying(**self._rules())(function, *args, **kwargs)
        except openai.OpenAIError as error:
            raise _given_up(error) from error.__cause__

    async def acall(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await until it returns; see `call`."""
        try:
            return await tenacity.AsyncRetrying(**self._rules())(function, *args, **kwargs)
        except openai.OpenAIError as error:
            raise _given_up(error) from error.__cause__

    def _rules(self) -> dict[str, Any]:
        # One wait for each failure, drawn before it is decided whether there is time for it.
        waits: dict[int, float] = {}

        def wait(state: tenacity.RetryCallState) -> float:
            if state.attempt_number not in waits:
                waits[state.attempt_number] = self._wait_s(state)
            return waits[state.attempt_number]

        def stop(state: tenacity.RetryCallState) -> bool:
            over = state.attempt_number >= self.attempts
            if over or (state.seconds_since_start or 0.0) + wait(state) > self.budget_s:
                _note_attempts(state)
                return True
            return False

        return {
            "wait": wait,
            "stop": stop,
            "retry": tenacity.retry_if_exception(self.retry_on),
            "reraise": True,
        }

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked_s = _retry_after_s(error.response.headers) if isinstance(error, openai.APIStatusError) else None
        if asked_s is not None:
            return asked_s
        wait_s: float = min(self.max_wait_s, self.first_wait_s * 2.0 ** (state.attempt_number - 1))
        return wait_s * (1 - 0.25 * random.random())  # noqa: S311 - spreads clients, hides nothing


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait for; None if it does not, or gives a date."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            asked_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if asked_s >= 0:
            return asked_s
    return None


def _note_attempts(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, openai.OpenAIError):
        error._bidikv_attempts = state.attempt_number  # type: ignore[attr-defined] # noqa: SLF001 - ours


def _given_up(error: openai.OpenAIError) -> openai.OpenAIError:
    """The same error, marked as one that was retried if it was one to retry."""
    attempts = getattr(error, "_bidikv_attempts", None)
    if attempts is None or isinstance(error, RetriesExhausted):
        return error
    kind: Any = type(error)
    error.__class__ = _exhausted(kind)
    error.attempts = attempts  # type: ignore[attr-defined] # declared by the class it has now
    return error


@cache
def _exhausted(kind: Any) -> Any:
    return type(
        kind.__name__, (kind, RetriesExhausted), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
