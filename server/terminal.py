"""The terminal that results are printed to."""

from __future__ import annotations

from typing import Final

from rich.console import Console

_TABLE_WIDTH: Final = 110
"""Where no terminal tells a width: wide enough for every column of our tables."""


def result_console() -> Console:
    """Standard output, without highlighting; in a pipe or a file as wide as our tables need."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _TABLE_WIDTH
    return console
