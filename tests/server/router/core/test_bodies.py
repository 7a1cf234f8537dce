"""What each leg is asked."""

import copy
import json
from dataclasses import replace

import pytest

from bidikv_server.reasons import Reason
from bidikv_server.router.core.bodies import (
    can_disaggregate,
    decode_body,
    decode_params,
    prefill_body,
    runs_alone,
)
from bidikv_server.router.core.content import media_of
from bidikv_server.router.core.paths import MESSAGES_PATH, RESPONSES_PATH
from bidikv_server.router.core.policy import Keep
from bidikv_server.router.core.requests import CHAT_PATH, COMPLETIONS_PATH, TurnRequest, read_request

FULL = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none",
    "response_format": {"type": "json_object"},
    "chat_template_kwargs": {"a": 1},
    "cache_salt": "s",
    "unheard_of": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 500,
    "max_completion_tokens": 500,
    "min_tokens": 10,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 3,
    "stop": ["x"],
    "session_id": "session-1",
    "kv_transfer_params": {"evil": 1},
    "vllm_xargs": {"kv_transfer_params": 1, "mine": 2},
}


def request(path=CHAT_PATH, **body) -> TurnRequest:
    return read_request(path, json.dumps(body).encode(), {})


def test_prefill_leg():
    """One token, nothing but what renders the prompt, and everything that does."""
    asked = prefill_body(request(**FULL), {"ours": 1})
    assert asked == {
        "model": "m",
        "messages": FULL["messages"],
        "tools": FULL["tools"],
        "tool_choice": "none",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"a": 1},
        "cache_salt": "s",
        "unheard_of": 1,
        "stream": False,
        "n": 1,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "vllm_xargs": {"mine": 2},
        "kv_transfer_params": {"ours": 1},
    }


def test_decode_leg():
    """The client's own request, transfers and session apart."""
    asked = decode_body(request(**FULL), {"ours": 1})
    changed = {"kv_transfer_params": {"ours": 1}, "vllm_xargs": {"mine": 2}}
    assert asked == {**{k: v for k, v in FULL.items() if k != "session_id"}, **changed}
    assert "kv_transfer_params" not in decode_body(request(**FULL), None)


def test_client_body_stays():
    """Building a leg edits nothing."""
    asked = request(**FULL)
    before = copy.deepcopy(dict(asked.body))
    prefill_body(asked, {})["vllm_xargs"].clear()
    decode_body(asked, {})
    assert asked.body == before


def test_completions_have_one_limit():
    """`max_completion_tokens` belongs to chat."""
    assert "max_completion_tokens" not in prefill_body(request(COMPLETIONS_PATH, model="m", prompt="x"), {})


def test_no_handle_no_params():
    """Decode gets our part only along with something to pull."""
    assert decode_params(None, conversation="c", salt="s", keep=Keep(1.0, protect=True)) is None
    assert decode_params({}, conversation="c", salt="s", keep=Keep(1.0, protect=True)) is None
    asked = decode_params({"h": 1}, conversation="c", salt="s", keep=Keep(1.0, protect=True))
    assert asked == {
        "h": 1,
        "bidikv": {
            "v": 1,
            "conversation": "c",
            "salt": "s",
            "retain_s": 1.0,
            "protect": True,
            "release": False,
        },
    }


@pytest.mark.parametrize(
    ("body", "possible"),
    [
        ({}, True),
        ({"n": 1, "best_of": None, "use_beam_search": False, "prompt_logprobs": None}, True),
        ({"n": True, "best_of": 0}, True),
        ({"n": 2}, False),
        ({"n": "2"}, False),
        ({"n": 2.0}, False),
        ({"n": [2]}, False),
        ({"best_of": 2}, False),
        ({"best_of": "2"}, False),
        ({"use_beam_search": True}, False),
        ({"prompt_logprobs": 0}, False),
        ({"prompt_embeds": "x"}, False),
        ({"prompt": "x"}, True),
        ({"prompt": ["x"]}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": ["x", "y"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"echo": True}, True),
        ({"echo": True, "logprobs": 0}, False),
        ({"echo": True, "logprobs": [1]}, False),
        ({"logprobs": 1}, True),
    ],
)
def test_what_one_handle_can_carry(body, possible):
    """Several sequences, or log probabilities of the prompt, are not for two engines."""
    assert can_disaggregate(body) is possible


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("text", False),
        ([{"type": "text", "text": "x"}], False),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], False),
        ([{"type": "image_url", "image_url": {"url": "data:"}, "uuid": None}], False),
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": None, "uuid": "mine"}], True),
        ([{"type": "audio_url", "uuid": 7}], True),
        ([["odd"], "odd", None], False),
        (None, False),
    ],
)
def test_media_that_the_client_names(content, named):
    """A name is not a content; whatever else a body holds is no name."""
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
    assert media_of(body).named is named


@pytest.mark.parametrize("messages", [None, "text", [7, None, []]])
def test_odd_messages_name_no_media(messages):
    """Engines say what is wrong with them."""
    assert not media_of({"messages": messages}).named


def test_responses_legs():
    """Prefill keeps nothing and says nothing; decode keeps its answer under the router's name, not the client's."""
    fields = {
        "model": "m",
        "input": "hi",
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "f"}],
    }
    answer = {
        "max_output_tokens": 9,
        "store": True,
        "background": True,
        "stream": True,
        "include": [],
        "request_id": "r",
    }
    asked = replace(request(RESPONSES_PATH, **fields, **answer), response_id="resp_1")
    assert prefill_body(asked, {}, token_ids=True) == {
        **fields,
        "stream": False,
        "store": False,
        "max_output_tokens": 1,
        "kv_transfer_params": {},
    }
    assert decode_body(asked, None) == {**fields, **answer, "request_id": "resp_1"}


def test_messages_legs():
    """One token; thinking stays, because a template may look at it."""
    fields = {
        "model": "m",
        "messages": [],
        "system": "s",
        "thinking": {"type": "enabled", "budget_tokens": 2000},
    }
    asked = request(MESSAGES_PATH, **fields, max_tokens=4000, stream=True, stop_sequences=["x"])
    assert prefill_body(asked, {}) == {**fields, "stream": False, "max_tokens": 1, "kv_transfer_params": {}}


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_prefill_is_asked_for_token_ids(path):
    """Where the endpoint has a field for it, and never because the client asked for itself."""
    asked = request(path, model="m", messages=[], prompt="x", return_token_ids=True)
    assert "return_token_ids" not in prefill_body(asked, {})
    assert prefill_body(asked, {}, token_ids=True)["return_token_ids"] is True
    assert decode_body(asked, {})["return_token_ids"] is True


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (CHAT_PATH, {"n": 2}, Reason.UNSUPPORTED),
        (CHAT_PATH, {"truncate_prompt_tokens": -1}, Reason.UNSUPPORTED),
        (CHAT_PATH, {"truncate_prompt_tokens": -1, "max_tokens": 5}, None),
        (CHAT_PATH, {"truncate_prompt_tokens": 100}, None),
        (CHAT_PATH, {"truncate_prompt_tokens": "-1"}, Reason.UNSUPPORTED),
        (CHAT_PATH, {"truncate_prompt_tokens": -1.0}, Reason.UNSUPPORTED),
        (CHAT_PATH, {"truncate_prompt_tokens": -1, "max_tokens": "0"}, Reason.UNSUPPORTED),
        (CHAT_PATH, {"truncate_prompt_tokens": -1, "max_completion_tokens": 0}, Reason.UNSUPPORTED),
        (COMPLETIONS_PATH, {"prompt": "x", "truncate_prompt_tokens": -1}, None),
        (
            COMPLETIONS_PATH,
            {"prompt": "x", "truncate_prompt_tokens": -1, "max_tokens": None},
            Reason.UNSUPPORTED,
        ),
        (CHAT_PATH, {"previous_response_id": "r"}, None),
        (MESSAGES_PATH, {"tool_choice": {"type": "auto"}}, None),
        (MESSAGES_PATH, {"tool_choice": {"type": "tool", "name": "f"}}, Reason.UNSUPPORTED),
        (MESSAGES_PATH, {"tool_choice": {"type": "any"}}, Reason.UNSUPPORTED),
        (MESSAGES_PATH, {"tool_choice": "any"}, None),
        (CHAT_PATH, {"tool_choice": {"type": "tool"}}, None),
        (RESPONSES_PATH, {}, None),
        (RESPONSES_PATH, {"previous_response_id": "r"}, Reason.PREVIOUS_RESPONSE),
        (RESPONSES_PATH, {"truncation": "auto"}, Reason.UNSUPPORTED),
        (RESPONSES_PATH, {"truncation": "auto", "max_output_tokens": 5}, None),
        (RESPONSES_PATH, {"truncation": "auto", "max_output_tokens": "0"}, Reason.UNSUPPORTED),
        (RESPONSES_PATH, {"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}, None),
        (RESPONSES_PATH, {"tools": [{"type": "code_interpreter"}]}, Reason.UNSUPPORTED),
        (RESPONSES_PATH, {"tools": [{"type": "mcp", "server_label": "x"}]}, Reason.UNSUPPORTED),
        (RESPONSES_PATH, {"tools": ["odd", {"type": ["mcp"]}]}, None),
    ],
)
def test_what_runs_on_decode_alone(path, fields, reason):
    """Whatever would make the two legs see different prompts, or read one handle twice."""
    assert runs_alone(request(path, model="m", messages=[], input="x", **fields)) is reason
