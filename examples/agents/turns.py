"""What the example agents share: their arguments, and how one turn is told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

PLAN = ("list_files", "read_lines", "search", "read_lines")
SYSTEM = "You answer questions about source code. You look things up with tools before you answer."


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

    def line(self) -> str:
        """The turn's reuse, for a terminal."""
        ttft = "?" if self.ttft_s is None else f"{self.ttft_s * 1000:.0f} ms"
        counts = (self.prompt_tokens, self.remote_tokens, self.local_tokens, self.computed_tokens)
        prompt, remote, local, computed = ("?" if count is None else count for count in counts)
        return (
            f"[turn {self.index}] {self.reason or 'no account'}: prompt {prompt} = remote {remote} + local {local}"
            f" + computed {computed} tokens, first token after {ttft}"
        )


def parse_arguments(description: str, argv: list[str] | None) -> argparse.Namespace:
    """The command line of both examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the router, with /v1")
    parser.add_argument("--model", required=True, help="the name under which the engines serve the model")
    parser.add_argument("--root", type=Path, default=Path(), help="directory of sources to look at")
    parser.add_argument("--turns", type=int, default=5, help="model calls: tool calls, then one answer")
    parser.add_argument("--question", default="What does this project do?")
    parser.add_argument("--max-tokens", type=int, default=60, help="longest answer, in tokens")
    parser.add_argument("--thread", default=None, help="name of the conversation; the same name continues it")
    arguments = parser.parse_args(argv)
    if arguments.turns < 1:
        parser.error("--turns must be at least 1")
    if not arguments.root.is_dir():
        parser.error(f"--root: no directory {arguments.root}")
    return arguments
