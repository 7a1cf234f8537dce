"""Request bodies for the two legs, each built from the client's body, which is never edited.

The prompt must come out the same on both engines, so every field that a chat template or a renderer may look at stays
in the prefill leg. That includes `tool_choice` and `response_format`, which some of vLLM's renderers write into the
prompt. What only shapes the answer, or makes prefill do more than its one token, goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bidikv_server import wire
from bidikv_server.reasons import Reason
from bidikv_server.router.core.paths import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_server.router.core.policy import Keep
    from bidikv_server.router.core.requests import TurnRequest

_TRANSFER_FIELDS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Instructions to the engines' transfer layers. A client's own never pass: they name hosts and blocks to read."""

_ROUTER_FIELDS: Final = _TRANSFER_FIELDS | {"session_id", "vllm_xargs"}
"""Fields written anew for every leg. Engines get the conversation's key in a header instead of the client's session."""

_CHOSEN_HERE: Final = frozenset({"request_id"})
"""What the Responses API's engine would take as the name of the response that it keeps: one client could write over
another's."""

_ANSWER_FIELDS: Final = frozenset(
    {
        "background",
        "best_of",
        "echo",
        "enable_response_messages",
        "include",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "repetition_detection",
        "request_id",
        "return_prompt_text",
        "return_token_ids",
        "return_token_offsets",
        "stop",
        "stop_sequences",
        "store",
        "stream",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "top_logprobs",
    }
)


_ONE_TOKEN: Final[dict[str, dict[str, Any]]] = {
    CHAT_PATH: {"stream": False, "n": 1, "max_tokens": 1, "max_completion_tokens": 1},
    COMPLETIONS_PATH: {"stream": False, "n": 1, "max_tokens": 1},
    MESSAGES_PATH: {"stream": False, "max_tokens": 1},
    RESPONSES_PATH: {"stream": False, "max_output_tokens": 1, "store": False},
}
_DEFAULT_LIMIT: Final = 16
"""`max_tokens` of a completion that says nothing of it."""
_RETURNING: Final = frozenset({CHAT_PATH, COMPLETIONS_PATH})
"""Endpoints that return a prompt's token ids themselves (`return_token_ids`)."""
_ENGINE_TOOLS: Final = frozenset({"code_interpreter", "container", "mcp", "web_search_preview"})
"""Tools of the Responses API that an engine with a tool server runs itself."""


def prefill_body(
    request: TurnRequest, kv_transfer_params: dict[str, Any] | None, *, token_ids: bool = False
) -> dict[str, Any]:
    """Body that makes an engine compute the prompt and one token, which nobody reads.

    Args:
        request: What the client asks for.
        kv_transfer_params: What prefill is told of the transfer; None tells it nothing.
        token_ids: Let the answer say the prompt's token ids, where the endpoint can.
    """
    body = {**_forwarded(request, without=_ANSWER_FIELDS), **_ONE_TOKEN[request.path]}
    if token_ids and request.path in _RETURNING:
        body["return_token_ids"] = True
    return body if kv_transfer_params is None else {**body, "kv_transfer_params": kv_transfer_params}


def returns_token_ids(path: str) -> bool:
    """Whether the endpoint itself can return a prompt's token ids; elsewhere prefill's connector has to."""
    return path in _RETURNING


def decode_body(request: TurnRequest, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
    """The client's own body, with the handle to the computed prompt if there is one."""
    body = _forwarded(request)
    if request.response_id is not None:
        body["request_id"] = request.response_id
    return body if kv_transfer_params is None else {**body, "kv_transfer_params": kv_transfer_params}


def decode_params(
    handle: dict[str, Any] | None, *, conversation: str, salt: str, keep: Keep, retains_alone: bool = False
) -> dict[str, Any] | None:
    """`kv_transfer_params` of the decode leg; None without a handle, unless decode retains all the same.

    Args:
        handle: What prefill offers; None or empty if it offers nothing, or did not run.
        conversation: Opaque key.
        salt: Per-tenant secret.
        keep: What becomes of the blocks.
        retains_alone: The engine is one of ours: it retains what it computed itself, too. A stock engine must not get
            parameters without a handle: it pins the blocks of such a request for good.
    """
    if not handle and not (retains_alone and (keep.retain_s > 0 or keep.release)):
        return None
    return wire.decode_leg(
        handle or {},
        conversation=conversation,
        salt=salt,
        retain_s=keep.retain_s,
        protect=keep.protect,
        release=keep.release,
    )


def runs_alone(request: TurnRequest) -> Reason | None:
    """Why decode has to serve the request without prefill; None if two engines can."""
    if request.previous_response is not None:
        return Reason.PREVIOUS_RESPONSE
    if not can_disaggregate(request.body) or _truncates_by_limit(request) or _runs_tools(request):
        return Reason.UNSUPPORTED
    return Reason.UNSUPPORTED if _forces_a_tool(request) else None


def _truncates_by_limit(request: TurnRequest) -> bool:
    """Whether the prompt's length depends on the answer's limit, which is another one in the prefill leg.

    vLLM truncates to the model's length where no limit is given, and to one token less where one is
    (`TokenizeParams.max_truncation_tokens`). The engines would compute prompts that are shifted by a token.
    """
    body = request.body
    if request.path == RESPONSES_PATH:
        return body.get("truncation") == "auto" and not _is_above(0, body.get("max_output_tokens"))
    length = body.get("truncate_prompt_tokens")
    truncates = length is not None and not _is_above(-1, length)
    if request.path == COMPLETIONS_PATH:
        return truncates and not _is_above(0, body.get("max_tokens", _DEFAULT_LIMIT))
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
    return truncates and not any(_is_above(0, limit) for limit in limits)


def _runs_tools(request: TurnRequest) -> bool:
    """Whether the engine may run tools within the answer: it computes then further prompts with the same parameters."""
    tools = request.body.get("tools")
    if request.path != RESPONSES_PATH or not isinstance(tools, list):
        return False
    return any(isinstance(tool, dict) and _is_one_of(tool.get("type"), _ENGINE_TOOLS) for tool in tools)


def _forces_a_tool(request: TurnRequest) -> bool:
    """Whether prefill's one token would be half a tool call, which the Messages API fails at: it reads the arguments."""
    choice = request.body.get("tool_choice")
    forced = isinstance(choice, dict) and _is_one_of(choice.get("type"), frozenset({"any", "tool"}))
    return request.path == MESSAGES_PATH and forced


def _is_one_of(value: Any, names: frozenset[str]) -> bool:
    return isinstance(value, str) and value in names


def can_disaggregate(body: Mapping[str, Any]) -> bool:
    """Whether one prefill can serve the request.

    A handle is read by one sequence, so several choices, several prompts or beams cannot share it, and prompt log
    probabilities exist only where the prompt is computed.
    """
    if not (_is_one(body.get("n")) and _is_one(body.get("best_of"))) or body.get("use_beam_search"):
        return False
    if body.get("prompt_logprobs") is not None or body.get("prompt_embeds") is not None:
        return False
    if body.get("echo") and body.get("logprobs") is not None:
        return False
    return not _is_batch(body.get("prompt"))


def _is_one(value: Any) -> bool:
    """Whether this asks for one of something for sure. vLLM reads `"2"` and `2.0` as two; what it refuses it may refuse."""
    return value is None or (isinstance(value, int) and value <= 1)


def _is_above(bound: int, value: Any) -> bool:
    """Whether this is a number above the bound for sure, in the one spelling that has no other reading."""
    return isinstance(value, int) and value > bound


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not all(type(token) is int for token in prompt)


def _forwarded(request: TurnRequest, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    body, dropped = request.body, _ROUTER_FIELDS | without
    if request.path == RESPONSES_PATH:
        dropped |= _CHOSEN_HERE
    forwarded = {name: value for name, value in body.items() if name not in dropped}
    if "vllm_xargs" in body:
        forwarded["vllm_xargs"] = _without_transfer(body["vllm_xargs"])
    if request.cache_salt is not None:
        forwarded["cache_salt"] = request.cache_salt
    return forwarded


def _without_transfer(xargs: Any) -> Any:
    """These end up among the same engine arguments that carry `kv_transfer_params`."""
    if not isinstance(xargs, dict):
        return xargs
    return {name: value for name, value in xargs.items() if name not in _TRANSFER_FIELDS}
