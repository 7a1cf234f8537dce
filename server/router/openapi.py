"""The router's OpenAPI description, served at /openapi.json.

It says what the router itself needs and answers. Of a turn's body that is little: every other field is the engine's, and
an engine's answer passes as it is.
"""

from __future__ import annotations

from typing import Any, Final

from bidikv import __version__
from bidikv.headers import READBACK_HEADER, REUSE_HEADER, SESSION_HEADER, TURN_HEADER

Json = dict[str, Any]

_KEY: Final[list[Json]] = [{"apiKey": []}, {"anthropicKey": []}, {}]
_ADMIN: Final[list[Json]] = [{"adminKey": []}]
_ADMIN_OR_TENANT: Final[list[Json]] = [{"adminKey": []}, {"apiKey": []}]
_TEXT_OR_LIST: Final[Json] = {"oneOf": [{"type": "string"}, {"type": "array", "items": {}}]}
_MESSAGES: Final[Json] = {"type": "array", "items": {"type": "object"}}
_MODEL: Final[Json] = {"type": "string", "minLength": 1}
_CONVERSATION: Final[Json] = {
    "name": "key",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "description": "As an answer's header `x-bidikv-session` has it.",
}
_LIMIT: Final[Json] = {
    "name": "limit",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000},
}
_NUMBER: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
_TURN_FIELDS: Final[Json] = {
    "model": _MODEL,
    "stream": {"type": "boolean"},
    "cache_salt": {"type": "string", "minLength": 1},
    "session_id": {"type": "string", "description": "Name of the conversation; see docs/identity.md."},
}
_ERRORS: Final[dict[str, str]] = {
    "400": "The request has to be changed.",
    "401": "No key, or one that is not known here.",
    "404": "There is no such thing.",
    "405": "The endpoint takes other methods.",
    "408": "The request did not arrive in its time.",
    "413": "The body is too large.",
    "429": "As many turns run and wait as may.",
    "431": "The headers are too large.",
    "502": "An engine failed.",
    "503": "No engine of a needed role is up, or the router is starting or stopping.",
    "504": "An engine did not answer in time.",
}


def describe() -> Json:
    """The whole description, as JSON values."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "bidikv router",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs in front of prefill and decode engines.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {**_turns(), **_passed_on(), **_responses(), **_own(), **_state(), **_admin()},
        "components": {
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A tenant's, where there are any.",
                },
                "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "adminKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "`admin_key` of the settings.",
                },
            },
            "schemas": {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR},
        },
    }


_ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR: Final[Json] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def _turns() -> Json:
    endpoints: tuple[tuple[str, str, list[str], Json], ...] = (
        ("/v1/chat/completions", "A chat turn", ["messages"], {"messages": _MESSAGES}),
        ("/v1/completions", "A completion", [], {"prompt": _TEXT_OR_LIST}),
        ("/v1/responses", "A turn of the Responses API", ["input"], {"input": _TEXT_OR_LIST}),
        ("/v1/messages", "A turn of the Messages API", ["messages"], {"messages": _MESSAGES}),
    )
    return {
        path: {
            "post": _operation(
                summary,
                answer="The engine's answer, whole or as server-sent events.",
                events=True,
                body={
                    "type": "object",
                    "required": ["model", *required],
                    "properties": {**_TURN_FIELDS, **fields},
                },
                parameters=[_header(name, what) for name, what in _TURN_HEADERS.items()],
                headers={
                    REUSE_HEADER: "What became of the prompt.",
                    "x-bidikv-session": "The conversation's key.",
                },
                errors=("400", "401", "404", "408", "413", "429", "431", "502", "503", "504"),
                error="MessagesError" if path == "/v1/messages" else "Error",
            )
        }
        for path, summary, required, fields in endpoints
    }


_TURN_HEADERS: Final = {
    SESSION_HEADER: "Name of the conversation; other conventions are in docs/identity.md.",
    TURN_HEADER: "The SDK's advice on this turn.",
    READBACK_HEADER: "`off` reads nothing back for this request.",
}


def _passed_on() -> Json:
    posts = {
        "/tokenize": "Tokens of a prompt",
        "/detokenize": "Text of tokens",
        "/v1/messages/count_tokens": "Number of a prompt's tokens",
    }
    errors = ("400", "401", "404", "408", "413", "431", "502", "503", "504")
    described: Json = {
        path: {
            "post": _operation(
                summary, answer="As a decode engine answers.", body={"type": "object"}, errors=errors, error=None
            )
        }
        for path, summary in posts.items()
    }  # fmt: skip
    models = _operation("Models of the engines", answer="As a decode engine answers.", errors=errors)
    return {**described, "/v1/models": {"get": models}}


def _responses() -> Json:
    name = {
        "name": "response_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"},
    }
    stream = {"name": "stream", "in": "query", "schema": {"type": "boolean"}}
    after = {
        "name": "starting_after",
        "in": "query",
        "schema": _NUMBER,
    }
    errors = ("400", "401", "404", "502", "503", "504")
    return {
        "/v1/responses/{response_id}": {
            "get": _operation(
                "A response that an engine keeps",
                answer="As its engine answers.",
                parameters=[name, stream, after],
                events=True,
                errors=errors,
            )
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _operation(
                "Stop a response in the background",
                answer="As its engine answers.",
                parameters=[name],
                errors=errors,
            )
        },
    }


def _own() -> Json:
    """What a caller may ask of its own conversations."""
    errors = ("400", "401", "404", "413")
    wait: Json = {
        "type": "object",
        "required": ["wait_s"],
        "properties": {"wait_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 10**9}},
    }
    return {
        "/v1/bidikv/conversations/{key}": {
            "get": _operation(
                "Why turns reused what they did", answer="It.", parameters=[_CONVERSATION], errors=errors
            ),
            "delete": _operation(
                "End a conversation", answer="What became of it.", parameters=[_CONVERSATION], errors=errors
            ),
        },
        "/v1/bidikv/conversations/{key}/wait": {
            "post": _operation(
                "Say that the next turn takes its time",
                answer="How long decode keeps what it holds.",
                parameters=[_CONVERSATION],
                body=wait,
                errors=errors,
            )
        },
    }


def _state() -> Json:
    """Endpoints without a key."""
    up = {"503": "It does not."}
    return {
        "/live": {"get": _open("The process runs", {})},
        "/health": {"get": _open("An engine of each role answers", up)},
        "/ready": {"get": _open("New turns are taken", up)},
        "/metrics": {"get": _open("Prometheus metrics", {}, media="text/plain")},
        "/openapi.json": {"get": _open("This description", {})},
    }


def _admin() -> Json:
    page: list[Json] = [
        _LIMIT,
        {"name": "before", "in": "query", "schema": _NUMBER},
        {"name": "tenant", "in": "query", "schema": {"type": "string"}},
    ]
    engine: Json = {"type": "object", "required": ["url"], "properties": {"url": {"type": "string"}}}
    common = ("401", "404")

    def drain(summary: str) -> Json:
        errors = ("400", *common, "413")
        return {"post": _operation(summary, answer="Its state.", body=engine, errors=errors, security=_ADMIN)}

    return {
        "/bidikv/v1/conversations": {
            "get": _operation(
                "Conversations, the one used last first",
                answer="A page of them.",
                parameters=page,
                errors=("400", *common),
                security=_ADMIN_OR_TENANT,
            )
        },
        "/bidikv/v1/conversations/{key}": {
            "get": _operation(
                "Why turns reused what they did",
                answer="The conversation.",
                parameters=[_CONVERSATION],
                errors=common,
                security=_ADMIN_OR_TENANT,
            ),
            "delete": _operation(
                "Release a conversation",
                answer="What became of it.",
                parameters=[_CONVERSATION],
                errors=common,
                security=_ADMIN_OR_TENANT,
            ),
        },
        "/bidikv/v1/engines/drain": drain("Give an engine no new legs"),
        "/bidikv/v1/engines/undrain": drain("Give a drained engine legs again"),
        "/bidikv/v1/overview": {
            "get": _operation("The router at a glance", answer="Counts.", errors=common, security=_ADMIN)
        },
        "/bidikv/v1/engines": {
            "get": _operation("All engines", answer="Their state.", errors=common, security=_ADMIN)
        },
        "/bidikv/v1/turns": {
            "get": _operation(
                "The last turns, newest first",
                answer="Them.",
                parameters=[_LIMIT, {"name": "after", "in": "query", "schema": _NUMBER}],
                errors=("400", *common),
                security=_ADMIN,
            )
        },
        "/bidikv/v1/config": {
            "get": _operation("Settings in effect", answer="Without secrets.", errors=common, security=_ADMIN)
        },
    }


def _open(summary: str, others: dict[str, str], *, media: str = "application/json") -> Json:
    responses: Json = {"200": {"description": "Yes.", "content": {media: {}}}}
    for status, description in others.items():
        responses[status] = {"description": description, "content": {media: {}}}
    return {"summary": summary, "security": [], "responses": responses}


def _operation(
    summary: str,
    *,
    answer: str,
    errors: tuple[str, ...],
    body: Json | None = None,
    parameters: list[Json] | None = None,
    headers: dict[str, str] | None = None,
    events: bool = False,
    error: str | None = "Error",
    security: list[Json] | None = None,
) -> Json:
    content: Json = {"application/json": {}}
    if events:
        content["text/event-stream"] = {}
    success: Json = {"description": answer, "content": content}
    if headers:
        success["headers"] = {
            name: {"description": what, "schema": {"type": "string"}} for name, what in headers.items()
        }
    shape: Json = {"schema": {"$ref": f"#/components/schemas/{error}"}} if error is not None else {}
    operation: Json = {
        "summary": summary,
        "security": _KEY if security is None else security,
        "responses": {
            "200": success,
            **{
                status: {"description": _ERRORS[status], "content": {"application/json": shape}}
                for status in errors
            },
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _header(name: str, what: str) -> Json:
    return {"name": name, "in": "header", "description": what, "schema": {"type": "string"}}
