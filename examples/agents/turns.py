"""What the example agents share: their arguments, what one run of an agent is given, and how one turn is told."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    import bidikv

PLAN = ("list_files", "read_lines", "search", "read_lines")
SYSTEM = "You answer questions about source code. You look things up with tools before you answer."

COMPARED_HISTORY_TOKENS: Final = 2000
"""Of source text in the first question of a comparison: long enough for prefill's work to be seen on a CPU."""
_CHARACTERS: Final = 3
"""To a token of source text, about."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One model call of an agent.

    Attributes:
        index: Model calls before this one.
        text: The answer's text.
        tool_name: The tool it called, if it did.
        tool_args: The call's arguments exactly as the model wrote them.
        ttft_s: Seconds from sending the call to the first streamed text or tool call.
        session: The conversation's wire id.
        reason: The router's code for what was reused.
        prompt_tokens: The whole prompt.
        remote_tokens: Of it, pulled from decode.
        local_tokens: Of it, found in prefill's prefix cache.
        computed_tokens: Of it, computed by prefill.
        agent: Who took the turn, where an example has more than one agent.
    """

    index: int
    text: str
    tool_name: str | None
    tool_args: str | None
    ttft_s: float | None
    session: str | None
    reason: str | None
    prompt_tokens: int | None
    remote_tokens: int | None
    local_tokens: int | None
    computed_tokens: int | None
    agent: str = ""

    @classmethod
    def of(
        cls,
        report: bidikv.TurnReport,
        *,
        index: int,
        text: str = "",
        tool_name: str | None = None,
        tool_args: str | None = None,
        agent: str = "",
    ) -> TurnRecord:
        """What a client's report and the answer say about a turn."""
        return cls(
            index=index,
            text=text,
            tool_name=tool_name,
            tool_args=tool_args,
            ttft_s=report.ttft_s,
            session=report.session,
            reason=report.reason,
            prompt_tokens=report.prompt_tokens,
            remote_tokens=report.remote_tokens,
            local_tokens=report.local_tokens,
            computed_tokens=report.computed_tokens,
            agent=agent,
        )

    def line(self) -> str:
        """The turn's reuse, for a terminal."""
        ttft = "?" if self.ttft_s is None else f"{self.ttft_s * 1000:.0f} ms"
        counts = (self.prompt_tokens, self.remote_tokens, self.local_tokens, self.computed_tokens)
        prompt, remote, local, computed = ("?" if count is None else count for count in counts)
        return (
            f"[{self.agent}{' ' if self.agent else ''}turn {self.index}] {self.reason or 'no account'}: prompt {prompt} = remote {remote} + local {local}"
            f" + computed {computed} tokens, first token after {ttft}"
        )


def _ignore(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an agent.

    Attributes:
        thread: Name of the conversation.
        readback: Whether its turns reuse what decode retains.
        cache_salt: Keeps the run from finding another's blocks in any engine's prefix cache; None shares them.
        on_token: Given each piece of text or of a tool call's arguments as it arrives.
    """

    thread: str
    readback: bool = True
    cache_salt: str | None = None
    on_token: Callable[[str], None] = _ignore

    def extra_body(self) -> dict[str, Any]:
        """Request fields that every call of the run carries."""
        return {} if self.cache_salt is None else {"cache_salt": self.cache_salt}


class Toolbox(Protocol):
    """Tools that an agent can offer and run."""

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the OpenAI API's form, in a fixed order."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool; mistaken calls are answered with text."""


Play: TypeAlias = Callable[[Run], Iterator[Sequence[TurnRecord]]]
"""An agent: yields after each of its steps, with the turns of the step: one, or several that ran at once."""


def parser_for(description: str, *, compares: bool = True) -> argparse.ArgumentParser:
    """The command line of all examples.

    Args:
        description: Of the example.
        compares: It can play with readback and without.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the router, with /v1")
    parser.add_argument("--model", required=True, help="the name under which the engines serve the model")
    parser.add_argument("--api-key", default="none", help="where the router asks for one")
    parser.add_argument("--max-tokens", type=int, default=60, help="longest answer, in tokens")
    parser.add_argument("--thread", default=None, help="name of the conversation; the same name continues it")
    if not compares:
        return parser
    parser.add_argument(
        "--compare", action="store_true", help="play it twice, with readback and without, and print both"
    )
    parser.add_argument("--plot", type=Path, help="where to draw a comparison, as PNG (needs matplotlib)")
    return parser


def parse_arguments(
    description: str, argv: list[str] | None, *, turns: int = 5, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The command line of the examples over a directory of sources.

    Args:
        description: Of the example.
        argv: What was given; None takes the process's.
        turns: How many by default.
        parser: To add to; from `parser_for` by default.
    """
    parser = parser or parser_for(description)
    parser.add_argument("--root", type=Path, default=Path(), help="directory of sources to look at")
    parser.add_argument("--turns", type=int, default=turns, help="model calls: tool calls, then one answer")
    parser.add_argument("--question", default="What does this project do?")
    parser.add_argument(
        "--history",
        type=int,
        default=None,
        metavar="TOKENS",
        help="source text in the question, in tokens, about; "
        f"default 0, with --compare {COMPARED_HISTORY_TOKENS}",
    )
    arguments = parser.parse_args(argv)
    if arguments.turns < 1:
        parser.error("--turns must be at least 1")
    if not arguments.root.is_dir():
        parser.error(f"--root: no directory {arguments.root}")
    if arguments.history is None:
        arguments.history = COMPARED_HISTORY_TOKENS if arguments.compare else 0
    check_arguments(parser, arguments)
    return arguments


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what no example can do."""
    if arguments.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")
    compares = getattr(arguments, "compare", None)
    if compares is None:
        return
    if arguments.plot is not None and not compares:
        parser.error("--plot draws a comparison: add --compare")
    if arguments.thread is not None and compares:
        parser.error("--compare plays new conversations: leave --thread away")


def question_of(arguments: argparse.Namespace) -> str:
    """The user's first message: source text as asked for, then the question."""
    if not arguments.history:
        return str(arguments.question)
    text = "".join(path.read_text("utf-8", "replace") for path in sorted(arguments.root.rglob("*.py")))
    text = (text or str(arguments.question)) * (arguments.history * _CHARACTERS // max(1, len(text)) + 1)
    return f"Here is source text.\n\n{text[: arguments.history * _CHARACTERS]}\n\n{arguments.question}"
