"""What this package raises itself; errors of a call stay the OpenAI client's own."""

from __future__ import annotations


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
