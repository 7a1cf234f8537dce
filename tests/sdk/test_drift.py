"""Changes of history, told from a conversation that goes on."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bidikv
from bidikv.drift import Reading, compare
from bidikv.memory import Memory
from bidikv.spellings import Spelling, meaning
from bidikv.testing import FakeRouter, ToolCall

SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "find")
]


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def called(arguments, content=None, call_id="call_1"):
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(text, call_id="call_1"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


FIRST = [SYSTEM, user("hi"), called('{"a": 1}'), result("one"), said("done"), user("and?")]


def drift(*requests):
    """How the last of these requests relates to those before it."""
    memory = Memory()
    for request in requests:
        messages, tools = request if isinstance(request, tuple) else (request, TOOLS)
        body = {"messages": copy.deepcopy(messages), "tools": copy.deepcopy(tools)}
        reviewed = memory.review("s", body, restore="off")
        memory.answered("s", reviewed, body)
    return reviewed.drift


def changed(index, **fields):
    messages = copy.deepcopy(FIRST)
    messages[index] |= fields
    return messages


@pytest.mark.parametrize(
    ("second", "summary"),
    [
        (FIRST, "retry"),
        ([*FIRST, said("yes")], "append"),
        ([*FIRST, said("yes"), user("go on")], "append"),
        (FIRST[:2], "rewind"),
        ([*FIRST[:3], result("two"), said("other")], "fork"),
        ([*FIRST[:5], user("something else")], "fork"),
        (changed(1, content="hello"), "edit at messages[1].content"),
        (changed(4, content="Done."), "edit at messages[4].content"),
        (changed(4, name="boss"), "edit at messages[4].name"),
        (changed(3, role="user"), "edit at messages[3].role"),
        (changed(2, **called('{"a": 2}')), "edit at messages[2].tool_calls[0].function.arguments"),
        (changed(2, **called('{"a": 1}', call_id="x")), "edit at messages[2].tool_calls[0].id"),
        (changed(0, content="be long"), "system at messages[0].content"),
        ([FIRST[0], user("inserted"), *FIRST[1:]], "edit at messages[1]"),
        ([FIRST[0], *FIRST[3:]], "edit at messages[1]"),
        ([*FIRST[:2], *FIRST[4:]], "edit at messages[2]"),
        ([SYSTEM, user("another question")], "start"),
        ([user("nothing in common")], "start"),
        ((FIRST, TOOLS[::-1]), "tools at tools"),
        ((FIRST, TOOLS[:1]), "tools at tools[find]"),
        (([*FIRST, said("yes")], []), "tools at tools[look]"),
        (([SYSTEM, user("another agent")], []), "start"),
        ((changed(1, content="hello"), []), "tools at tools[look]"),
    ],
)
def test_kinds(second, summary):
    """Each way in which a request may relate to the one before it, with the place of the change."""
    assert drift(FIRST, second).summary == summary


@pytest.mark.parametrize(
    "same",
    [
        changed(2, content=""),
        changed(2, tool_calls=called('{ "a":1 }')["tool_calls"]),
        changed(1, content=[{"type": "text", "text": "hi"}]),
        changed(4, reasoning="hm", refusal=None, tool_calls=[]),
        [dict(reversed(message.items())) for message in FIRST],
    ],
)
def test_spellings_that_make_no_difference(same):
    """Null and empty, a text and a list of it, JSON in another spelling, dropped reasoning, another order of keys."""
    assert drift(FIRST, same).kind == "retry"
    assert drift(same, [*FIRST, said("yes")]).kind == "append"


def test_branches_are_told_apart():
    """Parallel calls and forks each go on from their own last turn."""
    left, right = [*FIRST[:2], said("left")], [*FIRST[:2], said("right")]
    assert drift(FIRST[:2], left, right, [*left, user("on")]).kind == "append"
    assert drift(FIRST[:2], left, right, [*left, user("on")], [*right, user("on")]).kind == "append"


def test_the_answer_is_part_of_the_history():
    """What the model said and what comes back are compared, streamed or not."""
    for stream in (False, True):
        router = FakeRouter("the answer")
        client = router.client(conversation="a")
        answer = client.chat.completions.create(model="m", messages=[user("hi")], stream=stream)
        if stream:
            for chunk in answer:
                if chunk.choices[0].finish_reason:
                    break
        for text, kind in (("the answer", "append"), ("another", "edit")):
            again = client.chat.completions.create(model="m", messages=[user("hi"), said(text), user("more")])
            assert bidikv.turn_of(again).drift.kind == kind


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", [None, "I look it up."])
def test_message_of(stream, content):
    """The model's message as it goes back: its own bytes, null where it said nothing."""
    router = FakeRouter()
    router.reply(
        content,
        tool_calls=[ToolCall("look", '{"a" :1.0}', "c1"), ToolCall("find", "{", "c2")],
        reasoning="Hm.",
    )
    client = router.client(conversation="a")
    answer = client.chat.completions.create(model="m", messages=[user("hi")], stream=stream)
    if stream:
        with pytest.raises(TypeError, match="has to be read"):
            bidikv.message_of(answer)
        list(answer)
    message = bidikv.message_of(answer)
    assert message == {
        "role": "assistant",
        "content": content,
        "reasoning": "Hm.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a" :1.0}'}},
            {"id": "c2", "type": "function", "function": {"name": "find", "arguments": "{"}},
        ],
    }
    history = [user("hi"), message, result("one", "c1"), result("two", "c2")]
    turn = bidikv.turn_of(client.chat.completions.create(model="m", messages=history))
    assert (turn.drift.kind, turn.restored, turn.reason) == ("append", (), "hit")
    assert router.requests[1].body["messages"] == history


def test_reasoning_comes_back_only_if_asked_for():
    """`restore="all"` puts back what the caller dropped; the default leaves the caller's choice."""
    for restore, expected in (("spelling", None), ("all", "Hm.")):
        router = FakeRouter()
        router.reply("yes", reasoning="Hm.")
        client = router.client(conversation="a", restore=restore)
        client.chat.completions.create(model="m", messages=[user("hi")])
        client.chat.completions.create(model="m", messages=[user("hi"), said("yes"), user("more")])
        assert router.requests[1].body["messages"][1].get("reasoning") == expected


def test_edited_arguments_stay_edited():
    """Arguments that mean something else than the model's are the caller's own."""
    router = FakeRouter()
    router.reply(tool_calls=[ToolCall("look", '{"a": 1}', "call_1")])
    client = router.client(conversation="a")
    client.chat.completions.create(model="m", messages=[user("hi")])
    client.chat.completions.create(model="m", messages=[user("hi"), called('{"a": 2}'), result("x")])
    assert json.loads(router.requests[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {
        "a": 2
    }
    assert client._bidikv.conversation.turns[1].drift.path == "messages[1].tool_calls[0].function.arguments"


def test_restore_off():
    """Nothing is put back."""
    router = FakeRouter()
    router.reply(tool_calls=[ToolCall("look", '{"a" :1}', "call_1")])
    client = router.client(conversation="a", restore="off")
    client.chat.completions.create(model="m", messages=[user("hi")], tools=TOOLS)
    messages = [user("hi"), called('{"a": 1}', ""), result("x")]
    client.chat.completions.create(model="m", messages=messages, tools=TOOLS[::-1])
    assert router.requests[1].body["messages"] == messages
    assert router.requests[1].body["tools"] == TOOLS[::-1]


def test_frozen_system():
    """A system message that changes by itself goes out as it was in the first turn."""
    router = FakeRouter("yes")
    client = router.client(on_drift="raise")
    with client.conversation("a", freeze_system=True) as conversation:
        for minute in range(3):
            system = {"role": "system", "content": f"it is 12:0{minute}"}
            client.chat.completions.create(
                model="m", messages=[system, user("hi"), *[said("yes"), user("on")] * minute]
            )
    assert {request.body["messages"][0]["content"] for request in router.requests} == {"it is 12:00"}
    assert [turn.restored for turn in conversation.turns] == [(), ("messages[0]",), ("messages[0]",)]
    assert [turn.reason for turn in conversation.turns][1:] == ["hit", "hit"]


def test_on_drift():
    """Ignored, warned of where the call stands, raised before anything is sent, or handed to a function."""
    seen = []
    edited = [user("hello"), said("It is a fake router."), user("more")]
    for on_drift in ("ignore", "warn", "raise", seen.append):
        router = FakeRouter()
        client = router.client(conversation="a", on_drift=on_drift)
        client.chat.completions.create(model="m", messages=[user("hi")])
        if on_drift == "raise":
            with pytest.raises(bidikv.DriftError) as caught:
                client.chat.completions.create(model="m", messages=edited)
            assert caught.value.drift.path == "messages[0].content"
            assert len(router.requests) == 1
            continue
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            client.chat.completions.create(model="m", messages=edited)
        assert [item.category for item in warned] == [bidikv.DriftWarning] * (on_drift == "warn")
        assert all(item.filename == __file__ for item in warned)
    assert [drift.kind for drift in seen] == ["edit"]


def test_nothing_of_a_conversation_is_told():
    """What a drift says, and what is kept, holds no text of the messages."""
    memory = Memory()
    body = {"messages": [user("my secret")]}
    reviewed = memory.review("s", body, restore="off")
    memory.answered("s", reviewed, body)
    told = memory.review("s", {"messages": [user("other secret"), user("my secret")]}, restore="off").drift
    assert "secret" not in f"{told} {told!r} {reviewed.history!r}"


def test_histories_that_the_server_keeps():
    """A request that names a response goes on from what the model said there; one that nobody remembers tells nothing."""
    router = FakeRouter()
    client = router.client(conversation="a")
    first = client.responses.create(model="m", input=[user("hi"), said("ho"), user("hm")])
    named = {"model": "m", "previous_response_id": first.id}
    second = client.responses.create(input="ha", **named)
    client.responses.create(model="m", input="go on", previous_response_id=second.id)
    client.responses.create(input="another way", **named)
    client.responses.create(input="be brief now", instructions="be brief", **named)
    assert [turn.drift.summary for turn in client._bidikv.conversation.turns] == [
        "start",
        "append",
        "append",
        "fork",
        "edit at instructions",
    ]
    other = router.client(conversation="a")
    assert bidikv.turn_of(other.responses.create(input="ha", **named)).drift is None


def test_memory_is_bounded():
    """The conversation used last stays longest."""
    memory = Memory(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        body = {"messages": [user(name)]}
        memory.answered(name, memory.review(name, body, restore="off"), body)
    kinds = {
        name: memory.review(name, {"messages": [user(name)]}, restore="off").drift.kind for name in "abc"
    }
    assert (len(memory), kinds) == (2, {"a": "retry", "b": "start", "c": "retry"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": json_values, "tool_calls": json_values, "name": st.text(max_size=3)},
    )
    | json_values,
    max_size=6,
)


@given(messages, messages)
def test_whatever_is_sent_is_compared(first, second):
    """No shape of messages makes the comparison raise; an extension never counts as a change."""
    memory = Memory()
    body = {"messages": first}
    reviewed = memory.review("s", body, restore="all")
    memory.answered("s", reviewed, body)
    longer = memory.review("s", {"messages": [*copy.deepcopy(first), *second]}, restore="all")
    assert not longer.drift.breaks_prefix
    other = memory.review("s", {"messages": second}, restore="all")
    assert str(other.drift)
    assert len(longer.history.marks) == len(first) + len(second)


@given(messages)
def test_comparing_is_repeatable(first):
    """The same messages, built anew, are the same."""
    history = Reading(first, ()).history(None, 0)
    assert compare(Reading(copy.deepcopy(first), [history]))[0].kind == "retry"


def sent(body):
    """The bytes of a body, as the OpenAI client spells them."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


requests = st.lists(
    st.sampled_from([SYSTEM, user("é"), said("b"), said(""), called('{"a" :1}'), result('"messages":[')]),
    max_size=5,
)
ORDERS = (
    ("model", "messages", "tools"),
    ("messages", "model", "tools"),
    ("model", "tools", "messages"),
    ("metadata", "messages", "tools"),
    ("messages", "tools", "model"),
    ("messages", "stop", "model"),
    ("stop", "messages", "model"),
    ("tools", "messages", "model"),
)
turns_of_any_order = st.tuples(
    requests, st.sampled_from([[], TOOLS, TOOLS[:1], TOOLS[::-1]]), st.sampled_from(ORDERS)
)


@given(
    st.lists(turns_of_any_order, min_size=1, max_size=12), st.integers(1, 2), st.sampled_from([*ORDERS, None])
)
def test_the_bytes_that_are_sent_tell_what_walking_tells(turns, repeats, only):
    """A history is judged alike by the bytes of its body and message by message, whatever the order of the fields."""
    walking, reading = Memory(), Memory()
    for messages, tools, order in [turn for turn in turns for _ in range(repeats)]:
        fields = {
            "model": "m",
            "messages": messages,
            "tools": tools,
            "metadata": {"messages": []},
            "stop": ["]", "x"],
        }
        body = {name: fields[name] for name in only or order}
        seen = [
            memory.review("s", body, restore="off", content=content)
            for memory, content in ((walking, None), (reading, sent(body)))
        ]
        assert seen[0].drift == seen[1].drift
        assert seen[0].history.marks.part(0) == seen[1].history.marks.part(0)
        assert seen[1].history.tools == seen[0].history.tools
        assert seen[1].history.answers == sum(message["role"] == "assistant" for message in messages)
        for memory, reviewed in zip((walking, reading), seen, strict=True):
            memory.answered("s", reviewed, body)


def test_the_end_of_another_list_is_not_the_messages_end():
    """Three bodies end alike, but in two of them what ends there are the tools."""
    memory, messages = Memory(), [SYSTEM, user("hi")]
    kinds = []
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS[:1]}):
        body = {"messages": messages, **fields, "model": "m"}
        reviewed = memory.review("s", body, restore="off", content=sent(body))
        memory.answered("s", reviewed, body)
        kinds.append(reviewed.drift.kind)
    assert kinds == ["start", "tools", "tools"]


def test_a_long_history_is_read_in_few_steps():
    """Each turn adds one step, and many become one, so that a turn's time does not grow with their number."""
    memory, messages, most = Memory(), [SYSTEM], 0
    for number in range(40):
        messages = [*messages, user(f"{number}"), said("yes")]
        body = {"model": "m", "messages": messages}
        reviewed = memory.review("s", body, restore="off", content=sent(body))
        memory.answered("s", reviewed, body)
        assert reviewed.drift.kind == ("append" if number else "start")
        assert reviewed.history.steps
        most = max(most, len(reviewed.history.steps))
    assert 1 < most < 20


def test_bytes_of_another_request_prove_nothing():
    """Where what is sent is not what was asked for, the history is walked through."""
    body = {"model": "m", "messages": [SYSTEM, user("hi")]}
    other = sent({"model": "m", "messages": [SYSTEM, user("something else")]})
    for content in (
        other,
        b"",
        b"[]",
        b'{"model":"m","messages":[',
        sent({"metadata": body, "messages": []}),
    ):
        spelling = Spelling.in_body(content, body, "messages")
        assert spelling is None or spelling.split(body["messages"], 0, 0, None) == (0, None)
        memory = Memory()
        for _ in range(2):
            reviewed = memory.review("s", body, restore="off", content=content)
            memory.answered("s", reviewed, body)
        assert reviewed.drift.kind == "retry"


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ('{"a": 1, "b": [2]}', '{ "b":[2],"a":1}\n', True),
        ('{"a": {"c": 1, "b": 2}}', '{"a": {"b": 2, "c": 1}}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": []}', '{"a": {}}', False),
        ('{"a": [["b", 1]]}', '{"a": {"b": 1}}', False),
        ('{"a": 1', '{"a": 1}', False),
        ('{"a": 1} x', '{"a": 1}', False),
        ("", "{}", False),
    ],
)
def test_arguments_that_mean_the_same(left, right, same):
    """Order and white space do not count; types, and what is no JSON, do."""
    assert (meaning(left) == meaning(right)) is same
