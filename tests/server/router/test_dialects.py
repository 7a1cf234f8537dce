"""Errors in each API's shape, whole and inside a stream."""

import json

import pytest

from bidikv_server.router.core.engines import Role
from bidikv_server.router.dialects import ANTHROPIC, OPENAI, RESPONSES, dialect_of
from bidikv_server.router.errors import (
    BadRequest,
    BodyTooLarge,
    NoEngineAvailable,
    NotFound,
    RouterFault,
    TooManyTurns,
    Unauthorized,
    UnknownResponse,
    UpstreamFault,
    UpstreamTimedOut,
)


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", OPENAI),
        ("/tokenize", OPENAI),
        ("/v1/responses", RESPONSES),
        ("/v1/responses/resp_1/cancel", RESPONSES),
        ("/v1/responsesque", OPENAI),
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages/count_tokens", ANTHROPIC),
        ("/v1/messagesque", OPENAI),
    ],
)
def test_dialect_by_endpoint(path, dialect):
    """An endpoint and what lies below it."""
    assert dialect_of(path) is dialect


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (Unauthorized(missing=True), "authentication_error"),
        (NotFound("x"), "not_found_error"),
        (BodyTooLarge("x"), "request_too_large"),
        (TooManyTurns(), "rate_limit_error"),
        (NoEngineAvailable(Role.DECODE), "overloaded_error"),
        (UpstreamTimedOut("x"), "timeout_error"),
        (UpstreamFault("x"), "api_error"),
        (RouterFault("x"), "api_error"),
    ],
)
def test_anthropic_errors(fault, kind):
    """The types that Anthropic's clients tell apart."""
    expected = {"type": "error", "error": {"type": kind, "message": str(fault)}}
    assert json.loads(ANTHROPIC.error_bytes(fault)) == expected
    event, data, *_ = ANTHROPIC.error_event(fault).split(b"\n")
    assert (event, json.loads(data.removeprefix(b"data: "))) == (b"event: error", expected)


def test_responses_error_event():
    """An event of its own, numbered after those before it."""
    event, data, *_ = RESPONSES.error_event(UpstreamFault("gone"), 5).split(b"\n")
    assert event == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "code": "engine_failed",
        "message": "gone",
        "param": None,
        "sequence_number": 5,
        "error": {"message": "gone", "type": "server_error", "param": None, "code": "engine_failed"},
    }


def test_an_unknown_response_sounds_like_the_engine():
    """VLLM's own words and code, so that nobody learns who does not know it."""
    assert json.loads(RESPONSES.error_bytes(UnknownResponse("resp_1"))) == {
        "error": {
            "message": "Response with id 'resp_1' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": 404,
        }
    }
