"""The shapes in which the APIs tell a client of an error, whole or inside a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.router.core.answers import LAST_RESPONSE_EVENT
from bidikv_server.router.core.paths import MESSAGES_PATH, RESPONSES_PATH

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv_server.router.errors import RouterFault


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API speaks of errors.

    Attributes:
        error: The body of an error answer.
        event: The same as a server-sent event, which has this number in its stream.
        last_event: Line that begins a stream's last event, where that may hold transfer parameters.
        drops_null: Whole answers leave out fields that are null.
    """

    error: Callable[[RouterFault], dict[str, Any]]
    event: Callable[[RouterFault, int], tuple[bytes, dict[str, Any]]]
    last_event: bytes | None = None
    drops_null: bool = False

    def error_bytes(self, fault: RouterFault) -> bytes:
        """The body of an error answer."""
        return _compact(self.error(fault))

    def error_event(self, fault: RouterFault, number: int = 0) -> bytes:
        """The error as a server-sent event, for a stream that has begun."""
        name, data = self.event(fault, number)
        return name + b"data: " + _compact(data) + b"\n\n"


def _compact(value: Any) -> bytes:
    """JSON as vLLM writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")


_ANTHROPIC_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _openai(fault: RouterFault) -> dict[str, Any]:
    return fault.body()


def _openai_event(fault: RouterFault, _: int) -> tuple[bytes, dict[str, Any]]:
    return b"", fault.body()


def _responses_event(fault: RouterFault, number: int) -> tuple[bytes, dict[str, Any]]:
    """Flat, as the API describes it, and with the object that makes OpenAI's clients raise."""
    data = {
        "type": "error",
        "code": fault.code,
        "message": str(fault),
        "param": fault.param,
        "sequence_number": number,
        **fault.body(),
    }
    return b"event: error\n", data


def _anthropic(fault: RouterFault) -> dict[str, Any]:
    kind = _ANTHROPIC_KINDS.get(fault.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(fault)}}


def _anthropic_event(fault: RouterFault, _: int) -> tuple[bytes, dict[str, Any]]:
    return b"event: error\n", _anthropic(fault)


OPENAI: Final = Dialect(_openai, _openai_event)
RESPONSES: Final = Dialect(_openai, _responses_event, last_event=LAST_RESPONSE_EVENT)
ANTHROPIC: Final = Dialect(_anthropic, _anthropic_event, drops_null=True)


def dialect_of(path: str) -> Dialect:
    """The dialect of an endpoint."""
    for root, dialect in ((MESSAGES_PATH, ANTHROPIC), (RESPONSES_PATH, RESPONSES)):
        if path == root or path.startswith(root + "/"):
            return dialect
    return OPENAI
