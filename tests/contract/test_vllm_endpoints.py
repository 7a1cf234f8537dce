"""VLLM's endpoints as the router relies on them. An upgrade that moves any of it fails here, and only here."""

import inspect
from typing import get_args

import pytest

pytestmark = pytest.mark.contract

pytest.importorskip("vllm", reason="the contract is with an installed vLLM", exc_type=ImportError)

from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock, AnthropicMessagesRequest  # noqa: E402
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat  # noqa: E402
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: E402
from vllm.entrypoints.openai.responses.api_router import router as responses_router  # noqa: E402
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse  # noqa: E402
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses  # noqa: E402
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router  # noqa: E402
from vllm.renderers import chat_utils  # noqa: E402
from vllm.renderers.online_renderer import OnlineRenderer, _reused_prompt_token_ids  # noqa: E402
from vllm.renderers.params import TokenizeParams  # noqa: E402

from bidikv_server.router.core import content, mutations  # noqa: E402
from bidikv_server.router.core.bodies import _ANSWER_FIELDS, _ENGINE_TOOLS, can_disaggregate  # noqa: E402


def source(thing):
    return inspect.getsource(thing)


@pytest.mark.parametrize(
    ("request_type", "fields"),
    [
        (
            ChatCompletionRequest,
            {"kv_transfer_params", "cache_salt", "return_token_ids", "return_prompt_text"},
        ),
        (CompletionRequest, {"kv_transfer_params", "cache_salt", "return_token_ids", "suffix", "echo"}),
        (
            ResponsesRequest,
            {"kv_transfer_params", "cache_salt", "request_id", "store", "background", "max_output_tokens"},
        ),
        (AnthropicMessagesRequest, {"kv_transfer_params", "cache_salt", "max_tokens", "stop_sequences"}),
    ],
)
def test_fields(request_type, fields):
    """What the router writes, or leaves out of the prefill leg, exists."""
    assert fields <= set(request_type.model_fields)


@pytest.mark.parametrize("spelling", [1, True, 2, "1", "2", 2.0, "2.0"])
@pytest.mark.parametrize("request_type", [ChatCompletionRequest, CompletionRequest])
def test_several_choices_in_any_spelling(request_type, spelling):
    """What the router hands to two engines is one choice to vLLM, which also reads numbers written as text."""
    read = request_type(model="m", prompt="x", messages=[], n=spelling).n
    assert read == 1 or not can_disaggregate({"n": spelling})


def test_every_answer_field_is_known():
    """What is left out of a prefill leg is a field of some endpoint."""
    known = {"best_of", "stream_interval", "repetition_detection", "return_token_offsets"}
    for request_type in (
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        AnthropicMessagesRequest,
    ):
        known |= set(request_type.model_fields)
    assert known >= _ANSWER_FIELDS


def test_token_ids_are_taken_where_messages_are_rendered():
    """Chat, Responses and Messages all come through here; templating and tokenising are all that is left out."""
    taken = source(_reused_prompt_token_ids)
    assert 'kv.pop("prompt_token_ids", None)' in taken
    assert 'getattr(request, "echo", False)' in taken
    assert "has_non_text_content(messages)" in taken
    rendered = source(OnlineRenderer.preprocess_chat)
    assert rendered.index("reuse_ids = _reused_prompt_token_ids") < rendered.index(").adjust_request(")
    assert "preprocess_chat(" in source(OnlineRenderer.render_chat)
    assert "preprocess_chat(" in source(OnlineRenderer.render_responses)
    assert "kv_transfer_params=anthropic_request.kv_transfer_params" in source(
        AnthropicServingMessages._build_base_request
    )


@pytest.mark.parametrize(
    "answering",
    [OpenAIServingChat.chat_completion_stream_generator, OpenAIServingChat.chat_completion_full_generator],
)
def test_the_rendered_conversation_is_for_echo_alone(answering):
    """With token ids it is empty, and nothing else of an answer may come from it."""
    text = source(answering)
    assert text.count("conversation[-1]") == 3
    assert text.index("if request.echo") < text.index("conversation[-1]")


def test_only_asked_for_text_is_shown():
    """The prompt's text, which is not there with token ids, shows where `return_prompt_text` asks for it."""
    for answering in (
        OpenAIServingChat.chat_completion_stream_generator,
        OpenAIServingChat.chat_completion_full_generator,
    ):
        text = source(answering)
        assert text.count("prompt if request.return_prompt_text else None") == 1
        assert text.count("res.prompt ") == 1


def test_media_is_told_the_same_way():
    """What vLLM renders in spite of token ids counts as media here, too."""
    assert content._MEDIA_KEYS >= chat_utils._MEDIA_CONTENT_PART_KEYS
    blocks = set(get_args(AnthropicContentBlock.model_fields["type"].annotation))
    assert blocks - content._TEXT == {"image"}


def test_the_length_of_a_truncated_prompt_depends_on_the_limit():
    """Which is why such requests run on one engine."""
    unlimited = TokenizeParams(max_total_tokens=100, max_output_tokens=0, truncate_prompt_tokens=-1)
    limited = TokenizeParams(max_total_tokens=100, max_output_tokens=1, truncate_prompt_tokens=-1)
    assert (unlimited.max_truncation_tokens, limited.max_truncation_tokens) == (100, 99)


def test_tools_that_an_engine_runs():
    """These types and no others make an engine compute a second prompt within one response."""
    text = source(OpenAIServingResponses._create_responses)
    assert text.count("builtin_tool_list.append(") == 3
    assert all(f'"{name}"' in text for name in _ENGINE_TOOLS - {"mcp"})


def test_claude_codes_line():
    """Stripped from system text of every API."""
    assert mutations.BILLING_LINE == chat_utils._CLAUDE_CODE_BILLING_HEADER
    assert mutations.BILLING_LINE in source(AnthropicServingMessages._convert_system_message)


def test_endpoints():
    """What the router passes on exists under these paths and methods."""
    paths = {
        (method, route.path)
        for router in (responses_router, tokenize_router)
        for route in router.routes
        for method in route.methods
    }
    assert {
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/{response_id}"),
        ("POST", "/v1/responses/{response_id}/cancel"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    } <= paths


def test_a_response_is_kept_under_the_name_it_was_given():
    """`request_id` names it, and nobody checks whose it is."""
    assert "self.response_store[response.id] = response" in source(
        OpenAIServingResponses.responses_full_generator
    )
    assert "id=request.request_id" in source(ResponsesResponse.from_request)
    assert "not found" in source(OpenAIServingResponses._make_not_found_error)
