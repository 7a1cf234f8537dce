"""What can go wrong while launching: every message says what to do about it."""

from __future__ import annotations

from typing import ClassVar


class LaunchError(Exception):
    """Something could not be started. `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class ModelError(LaunchError):
    """There is no model at the path that was given."""

    exit_code = 2


class MissingExtraError(LaunchError):
    """An optional part of the installation is needed; the message names it."""

    exit_code = 2


class PortInUseError(LaunchError):
    """Another process listens on a port that was asked for."""


class ChildDiedError(LaunchError):
    """A process ended while others were waiting for it; the message carries the end of its log."""


class StartTimeoutError(LaunchError):
    """A process lives but did not become ready in time."""
