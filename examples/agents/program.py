"""Run an example: once, as its turns arrive, or as a comparison with and without readback."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING

import openai

import bidikv
from bidikv.examples.compare import Comparison, lockstep, table, write_plot
from bidikv.examples.turns import Run

if TYPE_CHECKING:
    import argparse

    from bidikv.examples.turns import Play

_WARM_UP_TURNS = 3
_WARM_UP_TEXT = (
    "The keeper climbed the stairs, lit the lamp and wrote the names of the ships into a book. " * 8
)


def run_example(arguments: argparse.Namespace, play: Play) -> int:
    """Play an agent as its command line asks.

    Args:
        arguments: As `parser_for` defines them.
        play: The agent.

    Returns:
        The program's exit code: 0, 1 if a comparison's answers differ, 2 if the router cannot be reached or refuses.
    """
    try:
        return _compare(arguments, play) if arguments.compare else _once(arguments, play)
    except openai.APIConnectionError as error:
        print(f"cannot reach the router at {arguments.base_url}: {error.__cause__ or error}", file=sys.stderr)
    except openai.APIStatusError as error:
        print(f"the router at {arguments.base_url} refuses: {error.message}", file=sys.stderr)
    return 2


def _once(arguments: argparse.Namespace, play: Play) -> int:
    run = Run(
        thread=arguments.thread or str(uuid.uuid4()), on_token=lambda text: print(text, end="", flush=True)
    )
    for step in play(run):
        for record in step:
            print(f"\n{record.line()}")
    return 0


def _compare(arguments: argparse.Namespace, play: Play) -> int:
    print("warming up", file=sys.stderr)
    _warm_up(arguments)
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    on, off = lockstep(
        play(Run(thread=one, cache_salt=one)),
        play(Run(thread=other, cache_salt=other, readback=False)),
        on_step=_progress,
    )
    comparison = Comparison.of(on, off)
    print(table(comparison))
    if arguments.plot is not None:
        try:
            write_plot(arguments.plot, comparison)
        except ModuleNotFoundError as error:
            print(f"no picture: {error}; pip install matplotlib", file=sys.stderr)
        else:
            print(f"picture: {arguments.plot}")
    return 0 if comparison.answers_identical else 1


def _progress(number: int) -> None:
    print(f"step {number}", file=sys.stderr)


def _warm_up(arguments: argparse.Namespace) -> None:
    """A few turns that nobody counts: the first pull between two engines also introduces them to each other."""
    with (
        bidikv.OpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client,
        client.conversation() as conversation,
    ):
        messages = [{"role": "user", "content": _WARM_UP_TEXT}]
        for _ in range(_WARM_UP_TURNS):
            answer = client.chat.completions.create(
                model=arguments.model,
                messages=messages,  # type: ignore[arg-type] # dicts of such literals
                max_tokens=8,
                temperature=0,
            )
            messages += [bidikv.message_of(answer), {"role": "user", "content": _WARM_UP_TEXT}]
        conversation.close()
