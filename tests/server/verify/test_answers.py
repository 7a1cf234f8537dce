"""Answers put together from what engines send."""

from __future__ import annotations

import pytest

from bidikv_server.verify.answers import AnswerBuilder, Position


def built(*bodies):
    builder = AnswerBuilder()
    for body in bodies:
        builder.add(body)
    return builder.build(None)


def test_a_streamed_chat():
    """Texts and ids are joined; chunks without choices and empty deltas add nothing."""
    answer = built(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Hel"}, "token_ids": [1]}]},
        {"choices": [{"delta": {"content": "lo"}, "token_ids": [2, 3], "finish_reason": "stop"}]},
        {"choices": [], "usage": {}},
    )
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hello", (1, 2, 3), "stop")
    assert answer.arguments is None


def test_a_whole_chat_and_a_whole_completion():
    """The same fields in other places."""
    message = {"content": "Hi", "tool_calls": None}
    assert built({"choices": [{"message": message, "token_ids": [4]}]}).text == "Hi"
    assert built({"choices": [{"text": " there", "token_ids": [5]}]}).token_ids == (5,)


def test_a_tool_call_in_pieces():
    """Arguments are joined as generated."""
    pieces = [{"name": "f", "arguments": '{"a":'}, {"arguments": " 1}"}, {"name": None}]
    answer = built(*({"choices": [{"delta": {"tool_calls": [{"function": f}]}}]} for f in pieces))
    assert answer.arguments == '{"a": 1}'
    assert answer.said() == '{"a": 1}'


def test_log_probabilities_of_both_apis():
    """The generated token is among its own alternatives."""
    top = [{"token": "token_id:1", "logprob": -0.1}]
    entry = {"token": "token_id:2", "logprob": -0.5, "top_logprobs": top}
    chat = built({"choices": [{"delta": {}, "logprobs": {"content": [entry]}}]})
    assert chat.positions == (Position("token_id:2", {"token_id:1": -0.1, "token_id:2": -0.5}),)
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "b": -2.0}]}
    assert built({"choices": [{"text": "a", "logprobs": logprobs}]}).positions[0].alternatives["b"] == -2.0


@pytest.mark.parametrize("choices", [7, [7], [{"delta": {"tool_calls": [{}]}}]])
def test_another_shape_is_refused(choices):
    """As a `ValueError`, whatever is wrong with it."""
    with pytest.raises(ValueError, match="OpenAI"):
        built({"choices": choices})
