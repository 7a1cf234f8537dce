"""What a plan is checked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bidikv_server.verify.plan import AnswerOf, Features, Op, Script, Text, Turn, problems

FIRST = Turn(0, Op.OPEN, 0, None, "chat", (Text("user", "Hello."),), 8)
SECOND = replace(FIRST, index=1, op=Op.APPEND, parts=(*FIRST.parts, AnswerOf(0), Text("user", "And?")))


def found(*turns):
    return list(problems(Script(0, list(turns)), Features(1024)))


def test_a_plain_conversation_has_no_problem():
    """A question, and another after the answer."""
    assert found(FIRST, SECOND) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"index": 5}, "index"),
        ({"parts": (*FIRST.parts, AnswerOf(1), Text("user", "And?"))}, "cannot know"),
        ({"parts": (*FIRST.parts, AnswerOf(0))}, "asks nothing"),
        ({"parts": ()}, "asks nothing"),
        ({"calls_tool": True}, "tool that is not there"),
        ({"parts": (Text("user", "word " * 1000),)}, "too long"),
    ],
)
def test_what_cannot_be_played_is_told(changes, problem):
    """Each with its reason."""
    assert any(problem in line for line in found(FIRST, replace(SECOND, **changes)))


@pytest.mark.parametrize(("length", "tokens"), [(100_000, 1500), (1024, 912), (50, 8)])
def test_prompts_keep_within_the_model(length, tokens):
    """With room for an answer, and never longer than what a run can afford."""
    assert Features(length).max_prompt_tokens == tokens
