"""HTTP requests for planned turns: warm in their conversation, cold as nobody's, or with log probabilities. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bidikv.headers import READBACK_HEADER, SESSION_HEADER, TURN_HEADER, TurnHeader
from bidikv_server.verify import prompts
from bidikv_server.verify.plan import EXPIRE_S, AnswerOf, Op, Part, Text, ToolResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_server.verify.answers import Answer
    from bidikv_server.verify.plan import Turn

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
ALTERNATIVES: Final = 20
"""vLLM's own limit. Constrained answers choose among tokens that are far from the top."""

JUNK: Final[tuple[Any, ...]] = (
    {"do_remote_prefill": True},
    {"do_remote_decode": True, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "nobody"},
    {"bidikv": {"v": 1, "conversation": "somebody-else"}},
    {"x": [None, 1.5, {"y": "z"}]},
    "text",
    7,
    [],
)


@dataclass(frozen=True, slots=True)
class Request:
    """What to send."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Naming:
    """How one conversation's requests are told from all others.

    Attributes:
        model: Served model name.
        stem: Session names begin with it; it is also the cache salt, which keeps other runs' blocks away.
        ttl_pause_s: What a pause past the TTL really waits; 0 if it does not.
    """

    model: str
    stem: str
    ttl_pause_s: float = 0.0

    def session(self, branch: int) -> str:
        """Wire id of a branch."""
        return f"{self.stem}-{branch}"


def warm_request(turn: Turn, answers: Mapping[int, Answer], naming: Naming) -> Request:
    """The turn as a client in the conversation sends it."""
    body = {**_body(turn, answers, naming.model), "cache_salt": naming.stem}
    if turn.junk is not None:
        body["kv_transfer_params"] = JUNK[turn.junk % len(JUNK)]
    header = TurnHeader(
        index=turn.index,
        kind=_kind(turn),
        parent=None if turn.parent is None else naming.session(turn.parent),
        retain_s=(naming.ttl_pause_s / 2 or EXPIRE_S) if turn.expires else None,
    )
    headers = {SESSION_HEADER: naming.session(turn.branch), TURN_HEADER: header.format()}
    return Request(path_of(turn), body, headers)


def cold_request(turn: Turn, answers: Mapping[int, Answer], naming: Naming, nonce: str) -> Request:
    """The same prompt as nobody's turn: no readback, and nothing of it in any prefix cache."""
    body = {**_body(turn, answers, naming.model), "cache_salt": nonce, "stream": True}
    return Request(path_of(turn), body, {SESSION_HEADER: f"cold-{nonce}", READBACK_HEADER: "off"})


def cold_key(turn: Turn, answers: Mapping[int, Answer], naming: Naming) -> str:
    """The same for turns whose cold runs are the same."""
    body = {**_body(turn, answers, naming.model), "stream": True}
    return f"{path_of(turn)} {json.dumps(body, sort_keys=True)}"


def with_logprobs(request: Request, *, token_ids: bool) -> Request:
    """The same request, which also asks for the alternatives of every token."""
    wanted: dict[str, Any] = {"stream": True, "logprobs": ALTERNATIVES}
    wanted["return_tokens_as_token_ids"] = token_ids
    if request.path == CHAT_PATH:
        wanted |= {"logprobs": True, "top_logprobs": ALTERNATIVES}
    return replace(request, body={**request.body, **wanted})


def path_of(turn: Turn) -> str:
    """The turn's endpoint."""
    return CHAT_PATH if turn.endpoint == "chat" else COMPLETIONS_PATH


def tool_fields(*, call: bool) -> dict[str, Any]:
    """Body fields that offer the tool; with `call` the answer has to use it."""
    named = {"type": "function", "function": {"name": prompts.TOOL_NAME}}
    return {"tools": [prompts.TOOL], "tool_choice": named if call else "none"}


def _body(turn: Turn, answers: Mapping[int, Answer], model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": turn.max_tokens,
        "stream": turn.stream,
        "return_token_ids": True,
    }
    if turn.endpoint == "completions":
        return {**body, "prompt": "".join(_plain(part, answers) for part in turn.parts)}
    if turn.lists_tool:
        body |= tool_fields(call=turn.calls_tool)
    return {**body, "messages": [_message(part, answers) for part in turn.parts]}


def _message(part: Part, answers: Mapping[int, Answer]) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"role": part.role, "content": part.text}
    answer = answers[part.turn]
    # A call that was cut off by its token limit is nothing that a client could repeat as a call.
    called = answer.arguments is not None and _is_object(answer.arguments)
    if isinstance(part, ToolResult):
        if called:
            return {"role": "tool", "tool_call_id": _call_id(part.turn), "content": part.text}
        return {"role": "user", "content": part.text}
    if not called:
        return {"role": "assistant", "content": answer.said()}
    function = {"name": prompts.TOOL_NAME, "arguments": answer.arguments}
    call = {"id": _call_id(part.turn), "type": "function", "function": function}
    return {"role": "assistant", "content": answer.text or None, "tool_calls": [call]}


def _plain(part: Part, answers: Mapping[int, Answer]) -> str:
    if isinstance(part, AnswerOf):
        return f"{answers[part.turn].said()}\n"
    if isinstance(part, Text) and part.role == "assistant":
        return f" {part.text}\n"
    return f"Question: {part.text}\nAnswer:"


def _kind(turn: Turn) -> str:
    if turn.op is Op.AUX:
        return "aux"
    return "tool" if isinstance(turn.parts[-1], ToolResult) else "main"


def _call_id(turn: int) -> str:
    return f"call-{turn}"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
