"""The conversion of LangChain messages: one spelling for each history, and the model's own where it has one."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from bidikv.integrations._messages import KEPT, parse_arguments, to_wire

RAW = '{ "path" :"a.py","n":1.0,"u":"\\u00e9"}'


def assistant(parsed, **kept):
    call = {"type": "tool_call", "id": "c1", "name": "read", "args": parsed}
    return AIMessage("", tool_calls=[call], additional_kwargs={KEPT: kept})


def arguments(message):
    return to_wire([message])[0]["tool_calls"][0]["function"]["arguments"]


def test_roles():
    """Each kind of message has its role, and keeps its order."""
    wire = to_wire(
        [
            SystemMessage("s"),
            HumanMessage("h", name="ann"),
            AIMessage("a", name="boss"),
            ToolMessage("t", tool_call_id="c1"),
            ChatMessage("d", role="developer"),
        ]
    )
    assert wire == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h", "name": "ann"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "tool_call_id": "c1", "content": "t"},
        {"role": "developer", "content": "d"},
    ]


def test_unknown_role():
    """A message that is no part of a prompt is refused."""
    with pytest.raises(TypeError, match="RemoveMessage"):
        to_wire([RemoveMessage(id="1")])


def test_raw_arguments_return():
    """Arguments go back exactly as the model wrote them."""
    assert arguments(assistant(json.loads(RAW), args={"c1": RAW})) == RAW


def test_edited_arguments_are_sent():
    """Arguments that someone changed are sent as changed."""
    assert arguments(assistant({"path": "é"}, args={"c1": RAW})) == '{"path": "é"}'


def test_unknown_arguments():
    """Calls that this package did not receive have one spelling."""
    assert arguments(assistant({"b": 1, "a": [2]})) == '{"b": 1, "a": [2]}'


@given(
    st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())
    )
)
def test_any_arguments(args):
    """Whatever the arguments, indented JSON of them goes back unchanged."""
    raw = json.dumps(args, indent=1)
    assert arguments(assistant(args, args={"c1": raw})) == raw


@given(st.text())
def test_parse_arguments_never_raises(raw):
    """Text that is no JSON object is no arguments."""
    assert parse_arguments(raw) is None or raw.lstrip().startswith("{")


def test_invalid_call_keeps_its_place():
    """A call that could not be parsed goes back raw, in the model's order."""
    message = assistant({"path": "a.py"}, args={"c0": "{oops", "c1": '{"path":"a.py"}'})
    message.invalid_tool_calls.append(
        {"type": "invalid_tool_call", "id": "c0", "name": "read", "args": "{oops", "error": None}
    )
    calls = to_wire([message])[0]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ["{oops", '{"path":"a.py"}']


def test_reasoning_returns():
    """Reasoning goes back under vLLM's name for it."""
    wire = to_wire([AIMessage("a", additional_kwargs={KEPT: {"reasoning": "hm"}})])
    assert wire == [{"role": "assistant", "content": "a", "reasoning": "hm"}]


@pytest.mark.parametrize("content", ["", [], [""], [{"type": "text", "text": ""}]])
def test_empty_content_has_one_spelling(content):
    """Nothing is an empty text, however it was spelt."""
    assert to_wire([AIMessage(content)]) == [{"role": "assistant", "content": ""}]
    assert to_wire([HumanMessage(content)]) == [{"role": "user", "content": ""}]


def test_content_blocks():
    """A single text block is text; several keep their structure for people and lose it for the model."""
    both = ["a", {"type": "text", "text": "b"}]
    assert to_wire([HumanMessage(both[:1])])[0]["content"] == "a"
    assert to_wire([HumanMessage(both)])[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    assert to_wire([AIMessage([*both, {"type": "reasoning", "reasoning": "x"}])])[0]["content"] == "ab"


def test_images():
    """Images take the API's form."""
    block = {"type": "image", "url": "http://x/y.png"}
    wire = to_wire([HumanMessage([{"type": "text", "text": "see"}, block])])
    assert wire[0]["content"][1] == {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


def test_nothing_is_mutated():
    """Converting leaves the messages as they were."""
    message = assistant(json.loads(RAW), args={"c1": RAW}, reasoning="r")
    before = copy.deepcopy(message)
    to_wire([message])
    assert message == before
