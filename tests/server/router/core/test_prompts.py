"""What counts as the same history in the Responses and Messages APIs."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.digests import chain
from bidikv_server.router.core.ids import Scope
from bidikv_server.router.core.paths import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH

SCOPE = Scope("t", "m")
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1, "b": 2}'}


def prefixes(path, **body):
    return chain(body, SCOPE, path).prefixes


def messages(*entries):
    return prefixes(MESSAGES_PATH, messages=list(entries))


def items(*entries, **fields):
    return prefixes(RESPONSES_PATH, input=list(entries), **fields)


def said(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("user", "a"), said("user", [{"type": "text", "text": "a"}])),
        (
            said("assistant", [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]),
            said("assistant", [USE]),
        ),
        (
            said("user", [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]),
            said(
                "user",
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "x"}],
                        "is_error": None,
                    }
                ],
            ),
        ),
    ],
)
def test_same_message(one, other):
    """Thinking and spelling do not count."""
    assert messages(one) == messages(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("user", "a"), said("assistant", "a")),
        (said("assistant", [USE]), said("assistant", [{**USE, "input": {"a": 2}}])),
        (said("user", "a"), said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    ],
)
def test_another_message(one, other):
    """What is said and done counts."""
    assert messages(one) != messages(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([said("user", "a")], [{"type": "message", **said("user", [{"type": "input_text", "text": "a"}])}]),
        (
            [{"type": "reasoning", "id": "r", "summary": []}, CALL],
            [{**CALL, "id": "fc_1", "status": "completed", "arguments": '{"b":2,"a":1}'}],
        ),
        (
            [
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    **said(
                        "assistant", [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]
                    ),
                }
            ],
            [said("assistant", "x")],
        ),
    ],
)
def test_same_items(one, other):
    """What the API adds to an item does not count, and reasoning does not."""
    assert items(*one) == items(*other)


def test_an_input_text_is_a_message():
    """A string, and a list of one user message."""
    assert prefixes(RESPONSES_PATH, input="hi") == items(said("user", "hi"))


def test_instructions_stand_first():
    """Other instructions are another conversation; the earlier input comes between."""
    assert items(said("user", "a"), instructions="x") != items(said("user", "a"), instructions="y")
    assert len(items(said("user", "a"), instructions="x", previous_input_messages=[said("user", "0")])) == 3


def test_effort_counts():
    """It may stand in the prompt."""
    assert items(CALL, reasoning={"effort": "low"}) != items(CALL, reasoning={"effort": "high"})
    assert items(CALL, reasoning={"summary": "auto"}) == items(CALL)


def test_apis_do_not_mix():
    """The same messages by another API are another conversation: they may be rendered otherwise."""
    assert messages(said("user", "a")) != prefixes(CHAT_PATH, messages=[said("user", "a")])


def test_going_on_from_a_response():
    """A digest of the earlier prompt stands for the history that the body does not repeat."""
    first = chain({"input": "a"}, SCOPE, RESPONSES_PATH).whole
    then = chain({"input": "b"}, SCOPE, RESPONSES_PATH, after=first)
    assert then != chain({"input": "b"}, SCOPE, RESPONSES_PATH)
    assert then == chain({"input": "b"}, SCOPE, RESPONSES_PATH, after=first)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "arguments", "id", "output", "tool_calls"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.sampled_from([CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH]),
    json_values,
    json_values,
    st.lists(json_values),
)
def test_any_body_has_a_chain(path, system, prompt, entries):
    """Whatever a client sends is placed or not, never an error, and never edited; one entry more goes on from it."""
    field = "input" if path == RESPONSES_PATH else "messages"
    for value in (prompt, entries):
        body = {"system": system, "instructions": system, "tools": system, field: value}
        before = copy.deepcopy(body)
        found = chain(body, SCOPE, path)
        assert body == before
        if isinstance(value, list) and found.prefixes:
            longer = chain({**body, field: [*value, said("user", "more")]}, SCOPE, path)
            assert longer.prefixes[: len(found.prefixes)] == found.prefixes
