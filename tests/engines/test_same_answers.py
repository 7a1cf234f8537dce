"""The router's answers are the engine's own: every byte but names, times and what was found in a cache."""

import json
import re
import urllib.error
import urllib.request
import uuid

import pytest

import bidikv
from bidikv_server.launch import readiness

from .conftest import opening

WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CHAT = {"messages": opening(times=1), "temperature": 0, "max_tokens": 6}
PROMPT = {"prompt": "The lighthouse keeper said that the ships", "temperature": 0, "max_tokens": 6}
RESPONSE = {
    "input": "Who lit the lamp?",
    "instructions": "Be brief.",
    "temperature": 0,
    "max_output_tokens": 6,
}
MESSAGE = {"messages": opening(times=1)[1:], "system": "Be brief.", "temperature": 0, "max_tokens": 6}
CASES = {
    "chat": ("/v1/chat/completions", CHAT),
    "log probabilities": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "several choices": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "token ids": ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
    "the prompt's text": ("/v1/chat/completions", {**CHAT, "return_prompt_text": True}),
    "an echo": ("/v1/chat/completions", {**CHAT, "echo": True}),
    "a prefilled answer": (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": [*CHAT["messages"], {"role": "assistant", "content": "The keeper"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "a tool": (
        "/v1/chat/completions",
        {
            **CHAT,
            "max_tokens": 20,
            "tools": [{"type": "function", "function": WEATHER}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "a streamed tool": (
        "/v1/chat/completions",
        {
            **CHAT,
            "max_tokens": 20,
            "stream": True,
            "tools": [{"type": "function", "function": WEATHER}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "a structured answer": (
        "/v1/chat/completions",
        {
            **CHAT,
            "max_tokens": 20,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "weather", "schema": WEATHER["parameters"]},
            },
        },
    ),
    "the prompt's log probabilities": ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}),
    "several choices in another spelling": ("/v1/chat/completions", {**CHAT, "n": "2"}),
    "a streamed chat": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "a wrong field": ("/v1/chat/completions", {**CHAT, "temperature": 5}),
    "a wrong type": ("/v1/chat/completions", {**CHAT, "top_p": "high"}),
    "a limit beyond the model": ("/v1/chat/completions", {**CHAT, "max_tokens": 99_999}),
    "too long a prompt": ("/v1/chat/completions", {**CHAT, "messages": opening(times=150)}),
    "another model": ("/v1/chat/completions", {**CHAT, "model": "another"}),
    "completion": ("/v1/completions", {**PROMPT, "logprobs": 1}),
    "an echoed completion": ("/v1/completions", {**PROMPT, "echo": True}),
    "a streamed completion": ("/v1/completions", {**PROMPT, "stream": True}),
    "response": ("/v1/responses", RESPONSE),
    "a streamed response": ("/v1/responses", {**RESPONSE, "stream": True}),
    "a response with its messages": ("/v1/responses", {**RESPONSE, "enable_response_messages": True}),
    "a wrong response": ("/v1/responses", {**RESPONSE, "temperature": 5}),
    "an unknown earlier response": ("/v1/responses", {**RESPONSE, "previous_response_id": "resp_0"}),
    "message": ("/v1/messages", MESSAGE),
    "a streamed message": ("/v1/messages", {**MESSAGE, "stream": True}),
    "a message that calls a tool": (
        "/v1/messages",
        {
            **MESSAGE,
            "max_tokens": 20,
            "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
            "tool_choice": {"type": "tool", "name": "weather"},
        },
    ),
    "a wrong message": ("/v1/messages", {**MESSAGE, "max_tokens": 0}),
    "a message to another model": ("/v1/messages", {**MESSAGE, "model": "another"}),
    "token counts": ("/v1/messages/count_tokens", {"messages": MESSAGE["messages"]}),
    "tokenize": ("/tokenize", {"messages": CHAT["messages"]}),
    "detokenize": ("/detokenize", {"tokens": [504, 3814, 253]}),
}
NAMES = re.compile(r'"(id|item_id|call_id|tool_use_id|request_id|signature)":"[^"]*"')
COUNTS = re.compile(r'"(created|created_at|completed_at|sequence_number|cached_tokens)":\d+')
CACHED = re.compile(r'"(\w*cache\w*_tokens|cached_tokens_per_turn)":(\d+|null|\[[^\]]*\])')
UNCACHED = re.compile(r'"(input_tokens)":\d+')
"""Of a prompt, in the Messages API: without what was found in a cache."""
FRACTION = re.compile(r"-?\d+\.\d+(?:[eE]-?\d+)?")
TEXT = re.compile(r'("(?:content|text|delta|arguments|partial_json)":)"((?:[^"\\]|\\.)*)"')


def ask(base_url, path, body):
    """Status, content type and body of an answer; without a body of ours the request is a GET."""
    request = urllib.request.Request(  # noqa: S310
        base_url + path,
        json.dumps(body).encode() if body is not None else None,
        {"Content-Type": "application/json", "X-Session-ID": uuid.uuid4().hex},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
            return answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read().decode()


def masked(text):
    """An answer without names, times, sequence numbers and cache counts, and its fractions in three digits."""
    for pattern in (NAMES, COUNTS, CACHED, *([UNCACHED] if '"type":"message' in text else [])):
        text = pattern.sub(r'"\1":_', text)
    return FRACTION.sub(lambda match: f"{float(match[0]):.3f}", text)


def merged(text):
    """A stream as its events without their texts, each kind once in a row, and the texts of all.

    An engine whose reader is slow puts two tokens into one event.
    """
    events, said = [], ""
    for event in masked(text).split("\n\n"):
        said += "".join(match[2] for match in TEXT.finditer(event))
        bare = TEXT.sub(r'\1""', event)
        if not events or events[-1] != bare:
            events.append(bare)
    return events, said


@pytest.mark.parametrize("case", CASES)
def test_as_the_engine_answers(cluster, case):
    """The same request to the router and to a decode engine alone: the same status, type and bytes."""
    path, fields = CASES[case]
    body = {"model": cluster.model_name, **fields}
    salted = path in {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    salt = (lambda: {"cache_salt": uuid.uuid4().hex}) if salted else dict
    through = ask(cluster.base_url.removesuffix("/v1"), path, {**body, **salt()})
    direct = ask(cluster.decode_urls[0], path, {**body, **salt()})
    assert through[:2] == direct[:2], (through[2], direct[2])
    if body.get("stream"):
        assert merged(through[2]) == merged(direct[2])
    else:
        assert masked(through[2]) == masked(direct[2])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_next_turn_of_each_api(cluster, path):
    """The history is read back, decode takes prefill's tokens, and the answer is the engine's own."""
    field, limit = ("input", "max_output_tokens") if path == "/v1/responses" else ("messages", "max_tokens")
    salt, session = uuid.uuid4().hex, uuid.uuid4().hex
    base_url = cluster.base_url.removesuffix("/v1")
    before = once(base_url)

    def turn(history, url=base_url, cache_salt=salt):
        body = {
            "model": cluster.model_name,
            field: history,
            limit: 24,
            "temperature": 0,
            "cache_salt": cache_salt,
        }
        request = urllib.request.Request(  # noqa: S310
            url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Session-ID": session},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
            told = json.load(answer)
            return told_text(told), bidikv.ReuseHeader.parse(answer.headers.get("x-bidikv-reuse", ""))

    history = opening(times=3)[1:]
    text, reuse = turn(history)
    assert reuse.reason == "new_conversation"
    history = [*history, {"role": "assistant", "content": text}, {"role": "user", "content": "Which ships?"}]
    text, reuse = turn(history)
    assert (reuse.reason, reuse.remote_tokens > 0) == ("hit", True)
    assert text == turn(history, cluster.decode_urls[0], uuid.uuid4().hex)[0]
    assert once(base_url) == before + 2


def test_going_on_from_a_response(cluster):
    """The engine that keeps it answers as it does when asked directly, and gives it back and cancels by its name."""
    base_url, decode_url = cluster.base_url.removesuffix("/v1"), cluster.decode_urls[0]
    body = {**RESPONSE, "model": cluster.model_name}
    first = json.loads(ask(base_url, "/v1/responses", body)[2])
    following = {**body, "input": "And why?", "previous_response_id": first["id"]}
    through, direct = (ask(url, "/v1/responses", following) for url in (base_url, decode_url))
    assert through[0] == 200
    assert masked(through[2]) == masked(direct[2])
    assert json.loads(through[2])["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    kept, refused = (f"/v1/responses/{first['id']}{end}" for end in ("", "/cancel"))
    assert ask(base_url, kept, None) == ask(decode_url, kept, None)
    assert json.loads(ask(base_url, kept, None)[2]) == first
    assert ask(base_url, refused, {}) == ask(decode_url, refused, {})


def told_text(answer):
    """What either API's answer says."""
    blocks = answer["output"][-1]["content"] if "output" in answer else answer["content"]
    return "".join(block["text"] for block in blocks)


def once(base_url):
    """How many prompts were tokenised once."""
    page = readiness.fetch(f"{base_url}/metrics")
    found = re.search(
        r'^bidikv_router_prompt_tokenisations_total\{outcome="once"\} (\S+)', page, re.MULTILINE
    )
    return float(found[1]) if found else 0.0
