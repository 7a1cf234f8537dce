"""What the examples of agent frameworks share: a tool, two questions, and how their turns are told."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Final

import openai

from bidikv.errors import MissingIntegrationError
from bidikv.examples.turns import TurnRecord, check_arguments, parser_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    import bidikv

INSTRUCTIONS: Final = "You help people who plan a trip. You look the weather up before you answer. " * 4
"""Long enough for whole blocks."""
QUESTIONS: Final = ("Should I go to Oslo or to Nice?", "And what should I pack?")


def weather(city: str) -> str:
    """Say what the weather of a city is like.

    Args:
        city: Its name.
    """
    return f"{city} is sunny, 24 degrees, and stays so until Sunday."


def run_framework(
    description: str, argv: list[str] | None, ask: Callable[[argparse.Namespace], Iterable[bidikv.TurnReport]]
) -> int:
    """Run an example and print its turns.

    Args:
        description: Of the example.
        argv: Its command line.
        ask: Runs the agent on `QUESTIONS`, prints its answers, and returns what the router said of the turns, if it is
            told.

    Returns:
        The program's exit code: 0, or 2 if the framework is missing, or the router cannot be reached or refuses.
    """
    parser = parser_for(description, compares=False)
    arguments = parser.parse_args(argv)
    check_arguments(parser, arguments)
    arguments.thread = arguments.thread or str(uuid.uuid4())
    try:
        for index, report in enumerate(ask(arguments)):
            print(TurnRecord.of(report, index=index).line())
    except MissingIntegrationError as error:
        print(error, file=sys.stderr)
        return 2
    except openai.APIConnectionError as error:
        print(f"cannot reach the router at {arguments.base_url}: {error.__cause__ or error}", file=sys.stderr)
        return 2
    except openai.APIStatusError as error:
        print(f"the router at {arguments.base_url} refuses: {error.message}", file=sys.stderr)
        return 2
    return 0
