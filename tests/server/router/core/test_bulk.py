"""What a body may hold: enough for every agent, and not enough to keep the router from everybody else."""

import json

import pytest

from bidikv_server.router.core.bulk import MAX_ITEMS, MAX_VALUES
from bidikv_server.router.core.paths import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH
from bidikv_server.router.core.requests import InvalidRequest, read_request

MESSAGE = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
TEXT = {"type": "text", "text": "hi"}


def read(path, **fields):
    return read_request(path, json.dumps({"model": "m", **fields}).encode(), {})


def holding(count):
    """Requests with so many items each, by the field that has them."""
    return [
        (CHAT_PATH, "messages", {"messages": [MESSAGE] * count}),
        (CHAT_PATH, "messages", {"messages": [{**MESSAGE, "content": [TEXT] * (count - 1)}]}),
        (CHAT_PATH, "messages", {"messages": [{"role": "assistant", "tool_calls": [CALL] * (count - 1)}]}),
        (CHAT_PATH, "tools", {"messages": [MESSAGE], "tools": [CALL] * count}),
        (MESSAGES_PATH, "system", {"messages": [MESSAGE], "system": [TEXT] * count}),
        (
            MESSAGES_PATH,
            "messages",
            {
                "messages": [
                    {**MESSAGE, "content": [{"type": "tool_result", "content": [TEXT] * (count - 2)}]}
                ]
            },
        ),
        (RESPONSES_PATH, "input", {"input": [MESSAGE] * count}),
        (RESPONSES_PATH, "input", {"input": [{**MESSAGE, "content": [TEXT] * (count - 1)}]}),
    ]


@pytest.mark.parametrize("number", range(len(holding(2))))
def test_items_are_bounded(number):
    """Wherever they stand; the field is named."""
    path, field, fields = holding(MAX_ITEMS)[number]
    assert read(path, **fields).body[field] == fields[field]
    path, field, fields = holding(MAX_ITEMS + 1)[number]
    with pytest.raises(InvalidRequest, match=str(MAX_ITEMS)) as refused:
        read(path, **fields)
    assert refused.value.param == field


def test_a_body_of_nothing_but_values_is_not_read():
    """However they are arranged; it need not even be JSON."""
    raw = b'{"model":"m","messages":[' + b"{}," * (MAX_VALUES + 1)
    with pytest.raises(InvalidRequest, match=str(MAX_VALUES)):
        read_request(CHAT_PATH, raw, {})


def test_text_and_token_ids_are_no_items():
    """A long prompt is one of each, whatever is in it."""
    text = "one, two, {three}, " * MAX_ITEMS
    assert read(CHAT_PATH, messages=[{**MESSAGE, "content": text}]).chain.prefixes
    assert read(COMPLETIONS_PATH, prompt=[7] * (2 * MAX_ITEMS)).chain.prefixes
