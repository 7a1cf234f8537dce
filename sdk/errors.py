"""What this package raises itself; errors of a call stay the OpenAI client's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bidikv.drift import Drift


class BidiKVError(Exception):
    """Base of everything raised here."""


class ConfigurationError(BidiKVError, ValueError):
    """An argument cannot mean anything, whatever the router answers."""


class MissingIntegrationError(BidiKVError, ImportError):
    """An integration was asked for whose libraries are not installed.

    Attributes:
        extra: The extra of this distribution that installs them.
    """

    def __init__(self, extra: str, missing: str | None = None) -> None:
        super().__init__(
            f'this needs {missing or extra}, which is not installed: pip install "bidikv[{extra}]"',
            name=missing,
        )
        self.extra = extra


class DriftError(BidiKVError):
    """A request changes history that should have stayed, and its client was made with `on_drift="raise"`. Nothing was sent.

    Attributes:
        drift: What changed.
    """

    def __init__(self, drift: Drift) -> None:
        super().__init__(str(drift))
        self.drift = drift


class DriftWarning(UserWarning):
    """A request changes history that should have stayed, and its client was made with `on_drift="warn"`."""


class RetriesExhausted(BidiKVError, RuntimeError):  # noqa: N818 - it stands beside the error's own class
    """What a call failed with is its last error, after a `RetryPolicy` has tried it as often as it may.

    Such an error is still of the class that the OpenAI client gave it. That it is a RuntimeError too tells retries further
    out, such as LangGraph's, that there is nothing left for them to do.

    Attributes:
        attempts: How often the call was tried.
    """

    attempts: int = 1
