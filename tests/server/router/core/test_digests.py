"""What counts as the same history, and what does not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_server.router.core.digests import chain
from bidikv_server.router.core.ids import Scope
from bidikv_server.router.core.prompts import CHUNK_CHARACTERS, CHUNKS_OF_A_SIZE, _chunks

SCOPE = Scope("t", "m")
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def prefixes(*messages, scope=SCOPE, **fields):
    return chain({"messages": list(messages), **fields}, scope).prefixes


def user(content):
    return {"role": "user", "content": content}


def test_extension():
    """A longer chat begins with the digests of the shorter one."""
    short = prefixes(user("a"), user("b"))
    long = prefixes(user("a"), user("b"), user("c"))
    assert long[:2] == short
    assert len(set(long)) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user([{"type": "text", "text": "a"}])),
        (ASSISTANT, {**ASSISTANT, "reasoning": "hm", "reasoning_content": "hm"}),
        (ASSISTANT, {"role": "assistant", "tool_calls": [CALL], "refusal": None}),
        (
            ASSISTANT,
            {
                **ASSISTANT,
                "tool_calls": [{**CALL, "function": {"arguments": '{"b":"x","a":1}', "name": "f"}}],
            },
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"content": "1", "role": "tool", "tool_call_id": "c"},
        ),
    ],
)
def test_equal(one, other):
    """Differences of spelling between SDKs do not count."""
    assert prefixes(one) == prefixes(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user("b")),
        (user("a"), {"role": "system", "content": "a"}),
        (ASSISTANT, {**ASSISTANT, "tool_calls": [{**CALL, "id": "d"}]}),
        (
            ASSISTANT,
            {**ASSISTANT, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": 2}'}}]},
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"role": "tool", "tool_call_id": "d", "content": "1"},
        ),
    ],
)
def test_different(one, other):
    """Another role, text, call or answered call is another history."""
    assert prefixes(one) != prefixes(other)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"scope": Scope("u", "m")},
        {"scope": Scope("t", "n")},
        {"scope": Scope("t", "m", cache_salt="x")},
    ],
)
def test_seed(fields):
    """What stands in front of the messages changes all digests."""
    assert not set(prefixes(user("a"), **fields)) & set(prefixes(user("a")))


@pytest.mark.parametrize("unit", ["x", [7]])
def test_completions(unit):
    """A prompt is cut into whole chunks; the rest only counts for the whole."""
    short = chain({"prompt": unit * 300}, SCOPE)
    long = chain({"prompt": unit * 700}, SCOPE)
    assert long.prefixes[: len(short.prefixes)] == short.prefixes
    assert short.prefixes
    assert chain({"prompt": unit * 301}, SCOPE).prefixes == short.prefixes
    assert chain({"prompt": unit * 301}, SCOPE).whole != short.whole
    assert chain({"prompt": [unit * 300]}, SCOPE).prefixes == short.prefixes


@given(st.integers(0, 3_000_000), st.integers(0, 600_000))
@settings(max_examples=25)
def test_chunks_of_long_prompts(length, more):
    """They grow, so that no prompt has very many, and end at the same places whatever follows."""
    short, long = "x" * length, "x" * length + "y" * more
    chunks, longer = _chunks(short, CHUNK_CHARACTERS), _chunks(long, CHUNK_CHARACTERS)
    assert longer[: len(chunks)] == chunks
    assert "".join(longer) == long[: sum(map(len, longer))]
    assert len(long) - sum(map(len, longer)) < (len(longer[-1]) * 4 if longer else CHUNK_CHARACTERS)
    assert len(longer) < 4 * CHUNKS_OF_A_SIZE


def test_text_and_ids_are_apart():
    """Equal-looking prompts of different kinds do not meet."""
    assert chain({"prompt": "1" * 256}, SCOPE).prefixes != chain({"prompt": [1] * 64}, SCOPE).prefixes


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "x"},
        {"messages": [1]},
        {"messages": []},
        {"prompt": ["a" * 999, "b" * 999]},
        {"prompt": {"a": 1}},
        {},
        {"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": '"\\ud800"'}}]}]},
        {"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": "[" * 100_000}}, 3, {}]}]},
    ],
)
def test_odd_shapes(body):
    """Anything that is JSON has a digest; it is the engine's to complain."""
    assert len(chain(body, SCOPE).whole) == 16
