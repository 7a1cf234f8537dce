"""How commands speak: progress and errors on stderr, results on stdout, errors as exit codes."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from bidikv_server.launch.errors import LaunchError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """One line of progress."""
    stderr.print(line, markup=False)


def fail(message: str, exit_code: int = 1) -> typer.Exit:
    """Print an error; raise what this returns."""
    stderr.print("[bold red]error:[/] ", end="")
    stderr.print(message, markup=False)
    return typer.Exit(exit_code)


@contextmanager
def launch_errors() -> Iterator[None]:
    """Turn errors that name their fix into a message and an exit code."""
    try:
        yield
    except LaunchError as error:
        raise fail(str(error), error.exit_code) from None


@contextmanager
def stop_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the command as Ctrl-C does, so that its children are ended too.

    SIGINT is set as well: a shell starts background jobs with it ignored, and Python would leave it so.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, action)


def require_extra(extra: str, *modules: str) -> None:
    """Check that an optional part is installed.

    Raises:
        MissingExtraError: It is not; the message names the extra.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f'{", ".join(missing)} missing: pip install "bidikv[{extra}]"')
