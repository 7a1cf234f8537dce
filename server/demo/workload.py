"""What the demo's agent does: how long its history is, how many turns it takes, and which text fills it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TASK: Final = (
    "Here is a part of a source tree. Look around in it with your tools, then say what it is for.\n\n"
)
FOLLOW_UP: Final = "Thank you. Now explain what this part does, and look at what it uses:\n\n"
TOKENS_PER_CHARACTER: Final = 0.4
"""A high first guess, for source text; `fill` measures."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The turns to play.

    Attributes:
        histories: Prompt tokens of the first turn, one conversation each.
        questions: Questions of each conversation; all but the first are follow-ups.
        turns_per_question: Model calls for each: tool calls, then an answer.
        max_tokens: Longest answer, in tokens.
        tool_characters: Longest tool result, in characters (about three to a token).
        follow_up_characters: Source text in each follow-up question, in characters.
        prefix_caching: Settings of prefill's own prefix cache to measure under.
    """

    histories: tuple[int, ...] = (1000, 4000)
    questions: int = 3
    turns_per_question: int = 3
    max_tokens: int = 60
    tool_characters: int = 380
    follow_up_characters: int = 320
    prefix_caching: tuple[bool, ...] = (False, True)

    def follow_ups(self, source: str) -> list[str]:
        """The questions after the first, each about another piece of `source`."""
        size = self.follow_up_characters
        return [FOLLOW_UP + source[n * size : (n + 1) * size] for n in range(self.questions - 1)]


FULL: Final = Workload()
QUICK: Final = Workload(questions=2, turns_per_question=2, prefix_caching=(False,))
WARM_UP: Final = Workload(questions=1, turns_per_question=3, max_tokens=8)


def fill(tokens: int, source: str, count: Callable[[str], int]) -> str:
    """The task plus as much of `source` as makes a first prompt of `tokens` tokens, to within a line or so.

    Args:
        tokens: Wanted size of the whole prompt, with the system message and the tools.
        source: Text to take from; repeated if it is too short.
        count: Prompt tokens of the first turn for a question, from the engine's own tokenizer.
    """
    source = source or TASK
    length = int(tokens / TOKENS_PER_CHARACTER)
    question = TASK
    for _ in range(6):
        text = source * (length // len(source) + 1)
        question = TASK + text[:length]
        error = count(question) - tokens
        if abs(error) <= 8:
            break
        length = max(0, length - int(error / TOKENS_PER_CHARACTER * 0.9))
    return question


def reused_generated_tokens(reused_tokens: int, previous_prompt_tokens: int | None) -> int:
    """Tokens that decode generated in the previous turn and that were reused in this one.

    What follows the previous prompt in this one is what the model wrote, so reuse beyond it is reuse of that.
    """
    return 0 if previous_prompt_tokens is None else max(0, reused_tokens - previous_prompt_tokens)


def source_text(files: Iterable[str]) -> str:
    """One text of all files."""
    return "\n\n".join(files)
