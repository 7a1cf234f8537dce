"""The requests that turns become."""

from __future__ import annotations

from dataclasses import replace

from bidikv.headers import SESSION_PATTERN, TurnHeader
from bidikv_server.verify.answers import Answer
from bidikv_server.verify.plan import AnswerOf, Op, Text, ToolResult, Turn
from bidikv_server.verify.requests import Naming, cold_key, cold_request, warm_request, with_logprobs

NAMING = Naming("m", "verify-0-1")
TURN = Turn(2, Op.APPEND, 0, None, "chat", (Text("user", "Hi"), AnswerOf(0), Text("user", "And?")), 8)
ANSWERS = {0: Answer("Hello", arguments=None), 1: Answer("", arguments='{"colour": "red"}')}


def test_a_warm_request_belongs_to_its_session():
    """Greedy, with ids, under the conversation's salt; the answer is repeated as it was."""
    request = warm_request(TURN, ANSWERS, NAMING)
    assert request.path == "/v1/chat/completions"
    assert request.headers["X-Session-ID"] == "verify-0-1-0"
    assert SESSION_PATTERN.fullmatch(request.headers["X-Session-ID"])
    body = request.body
    assert body["messages"][1] == {"role": "assistant", "content": "Hello"}
    assert (body["temperature"], body["return_token_ids"], body["cache_salt"]) == (0, True, "verify-0-1")


def test_a_cold_request_is_nobodys():
    """The same prompt with nothing that could be reused, and the same for all ways to ask for it."""
    junk = replace(TURN, junk=0, stream=False)
    request = cold_request(junk, ANSWERS, NAMING, "nonce")
    assert request.headers == {"X-Session-ID": "cold-nonce", "x-bidikv-readback": "off"}
    assert request.body["messages"] == warm_request(TURN, ANSWERS, NAMING).body["messages"]
    assert request.body["cache_salt"] == "nonce"
    assert "kv_transfer_params" not in request.body
    assert cold_key(junk, ANSWERS, NAMING) == cold_key(TURN, ANSWERS, NAMING)
    assert cold_key(replace(TURN, max_tokens=9), ANSWERS, NAMING) != cold_key(TURN, ANSWERS, NAMING)


def test_what_an_operation_adds():
    """A tiny TTL, a parent, the kind, or junk."""

    def header(turn, naming=NAMING):
        return TurnHeader.parse(warm_request(turn, ANSWERS, naming).headers["x-bidikv-turn"])

    assert header(TURN).retain_s is None
    assert header(replace(TURN, expires=True)).retain_s == 0.001
    assert header(replace(TURN, expires=True), replace(NAMING, ttl_pause_s=3.0)).retain_s == 1.5
    assert header(replace(TURN, op=Op.AUX)).kind == "aux"
    assert header(replace(TURN, branch=1, parent=0)).parent == "verify-0-1-0"
    assert "kv_transfer_params" in warm_request(replace(TURN, junk=99), ANSWERS, NAMING).body


def test_a_tool_call_is_repeated_with_its_result():
    """As generated, and the result answers it."""
    parts = (Text("user", "Hi"), AnswerOf(1), ToolResult(1, "done"))
    turn = replace(TURN, parts=parts, lists_tool=True)
    body = warm_request(turn, ANSWERS, NAMING).body
    call, result = body["messages"][1:]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"colour": "red"}'
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert body["tool_choice"] == "none"
    assert warm_request(replace(turn, calls_tool=True), ANSWERS, NAMING).body["tool_choice"] != "none"


def test_a_call_that_was_cut_off_is_repeated_as_text():
    """Engines refuse arguments that are no JSON."""
    parts = (Text("user", "Hi"), AnswerOf(1), ToolResult(1, "done"))
    cut = {1: Answer("", arguments='{"colour": "r')}
    messages = warm_request(replace(TURN, parts=parts), cut, NAMING).body["messages"]
    assert messages[1:] == [
        {"role": "assistant", "content": '{"colour": "r'},
        {"role": "user", "content": "done"},
    ]


def test_a_completion_extends_its_text():
    """The next prompt begins with the last one and its answer."""
    first = replace(TURN, endpoint="completions", parts=(Text("user", "Hi"),))
    following = replace(first, parts=(*first.parts, AnswerOf(0), Text("user", "And?")))
    before, after = (warm_request(turn, ANSWERS, NAMING) for turn in (first, following))
    assert before.path == "/v1/completions"
    assert after.body["prompt"].startswith(before.body["prompt"] + "Hello")


def test_log_probabilities_are_asked_in_each_apis_own_way():
    """A count for completions, a flag and a count for chat."""
    chat = with_logprobs(warm_request(TURN, ANSWERS, NAMING), token_ids=True).body
    assert (chat["logprobs"], chat["top_logprobs"], chat["return_tokens_as_token_ids"]) == (True, 20, True)
    completion = warm_request(replace(TURN, endpoint="completions"), ANSWERS, NAMING)
    assert with_logprobs(completion, token_ids=False).body["logprobs"] == 20
