"""A multi-turn agent with executable tools of the Berkeley Function Calling Leaderboard, in a small scenario of our own.

The user asks for one thing after the other; the agent works in a file system and a ticket queue that keep their state. By
default the tools of each question are prescribed (`tool_choice`), so that a model too small to choose still runs a real
loop. With `--free` the model calls what it likes, until it answers.

    pip install --no-deps bfcl-eval
    python -m bidikv.examples.bfcl_agent --base-url http://127.0.0.1:8000/v1 --model MODEL
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import bidikv
from bidikv.examples.bfcl_tools import BfclTools, MissingToolsError
from bidikv.examples.openai_loop import read, record_of, run_tool
from bidikv.examples.program import run_example
from bidikv.examples.turns import Run, check_arguments, parser_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from bidikv.examples.turns import TurnRecord

SYSTEM: Final = (
    "You keep an office's files and support tickets. You look things up with tools before you answer."
)

_MINUTES = "\n".join(
    f"{day} March. Room {room}: the projector was {state}; {who} looks into it and reports to the office."
    for day, room, state, who in (
        (3, 101, "repaired", "Ada"),
        (5, 204, "missing its remote", "Ben"),
        (9, 101, "flickering again", "Ada"),
        (12, 305, "replaced", "Cleo"),
        (17, 204, "still missing its remote", "Ben"),
        (21, 101, "sent to the maker", "Cleo"),
    )
)
_BUDGET = "\n".join(
    f"item {n:02d}; room {100 + n}; planned {n * 35} euro; spent {n * 31} euro" for n in range(1, 15)
)

STATE: Final[Mapping[str, Mapping[str, Any]]] = {
    "GorillaFileSystem": {
        "root": {
            "office": {
                "type": "directory",
                "contents": {
                    "minutes.txt": {"type": "file", "content": _MINUTES},
                    "budget.txt": {"type": "file", "content": _BUDGET},
                    "archive": {"type": "directory", "contents": {}},
                },
            }
        }
    },
    "TicketAPI": {
        "ticket_queue": [
            {
                "id": 1,
                "title": "Remote of room 204",
                "description": "It is gone.",
                "status": "Open",
                "priority": 2,
                "created_by": "ben",
            }
        ],
        "ticket_counter": 2,
        "current_user": "ben",
    },
}
"""In the package's form."""

_FILES: Final = ("minutes.txt", "budget.txt")
CHOICES: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "cat": {"file_name": _FILES},
    "grep": {"file_name": _FILES, "pattern": ("room", "Room 101", "euro")},
    "tail": {"file_name": _FILES, "lines": (2, 5)},
    "sort": {"file_name": _FILES},
    "wc": {"file_name": _FILES, "mode": ("l", "w", "c")},
    "ls": {"a": (True, False)},
    "get_ticket": {"ticket_id": (1, 2)},
    "create_ticket": {"title": ("Projector of room 101", "Remote of room 204"), "priority": (1, 3, 5)},
}

QUESTIONS: Final = (
    ("What is there about the projectors?", ("ls", "cat", "grep")),
    ("Is anybody looking into it? Open a ticket if nobody is.", ("get_ticket", "create_ticket")),
    ("And what did we spend on the rooms?", ("tail", "wc")),
)
"""What the user asks, and the tools that the answer takes."""

_MAX_CALLS: Final = 6
"""Of a model that chooses itself, for one question."""


@dataclass(frozen=True, slots=True)
class Office:
    """The agent.

    Attributes:
        client: To the router.
        tools: In the state that they are in.
        options: Of every call.
        free: The model chooses its tools.
    """

    client: bidikv.OpenAI
    tools: BfclTools
    options: Mapping[str, Any] = field(default_factory=dict)
    free: bool = False

    def turns(self, thread: str, run: Run) -> Iterator[TurnRecord]:
        """All questions, one after the other.

        Raises:
            openai.APIError: The router cannot be reached, or fails a call.
        """
        conversation = self.client.conversation(thread)
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        schemas: Any = self.tools.schemas()
        index = 0
        for question, plan in QUESTIONS:
            messages.append({"role": "user", "content": question})
            for choice in self._choices(plan):
                with conversation:
                    stream = self.client.chat.completions.create(
                        messages=messages,
                        tools=schemas,
                        tool_choice=choice,
                        stream=True,
                        temperature=0,
                        **self.options,
                    )
                    answer = read(stream, run.on_token)
                messages.append(answer)
                calls = answer.get("tool_calls", [])
                messages += [run_tool(self.tools, call) for call in calls]
                yield record_of(index, answer, stream)
                index += 1
                if self.free and not calls:
                    break

    def _choices(self, plan: tuple[str, ...]) -> list[Any]:
        if self.free:
            return ["auto"] * _MAX_CALLS + ["none"]
        return [*({"type": "function", "function": {"name": name}} for name in plan), "none"]


def play(arguments: argparse.Namespace, run: Run) -> Iterator[list[TurnRecord]]:
    """Run the agent through all questions."""
    free = arguments.free
    tools = BfclTools(STATE, only=None if free else tuple(CHOICES), choices=None if free else CHOICES)
    with bidikv.OpenAI(
        base_url=arguments.base_url, api_key=arguments.api_key, readback=run.readback
    ) as client:
        options = {
            "model": arguments.model,
            "max_tokens": arguments.max_tokens,
            "extra_body": run.extra_body(),
        }
        for record in Office(client, tools, options, free=free).turns(run.thread, run):
            yield [record]


def main(argv: list[str] | None = None) -> int:
    """Run the agent through all questions."""
    parser = parser_for("A multi-turn agent with the executable tools of bfcl-eval.")
    parser.add_argument(
        "--free", action="store_true", help="the model chooses its tools (needs a capable one)"
    )
    arguments = parser.parse_args(argv)
    check_arguments(parser, arguments)
    try:
        return run_example(arguments, partial(play, arguments))
    except MissingToolsError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
