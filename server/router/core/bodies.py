"""Request bodies for the two legs, each built from the client's body, which is never edited.

The prompt must come out the same on both engines, so every field that a chat template or a renderer may look at stays
in the prefill leg. That includes `tool_choice` and `response_format`, which some of vLLM's renderers write into the
prompt. What only shapes the answer, or makes prefill do more than its one token, goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bidikv_server import wire
from bidikv_server.router.core.requests import CHAT_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_server.router.core.policy import Keep
    from bidikv_server.router.core.requests import TurnRequest

_TRANSFER_FIELDS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Instructions to the engines' transfer layers. A client's own never pass: they name hosts and blocks to read."""

_ROUTER_FIELDS: Final = _TRANSFER_FIELDS | {"session_id", "vllm_xargs"}
"""Fields written anew for every leg. Engines get the conversation's key in a header instead of the client's session."""

_ANSWER_FIELDS: Final = frozenset(
    {
        "best_of",
        "echo",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "repetition_detection",
        "return_prompt_text",
        "return_token_ids",
        "return_token_offsets",
        "stop",
        "stream",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "top_logprobs",
    }
)


def prefill_body(request: TurnRequest, kv_transfer_params: dict[str, Any]) -> dict[str, Any]:
    """Body that makes an engine compute the prompt and one token, which nobody reads."""
    body = {**_forwarded(request, without=_ANSWER_FIELDS), "stream": False, "n": 1, "max_tokens": 1}
    if request.path == CHAT_PATH:
        body["max_completion_tokens"] = 1
    return {**body, "kv_transfer_params": kv_transfer_params}


def decode_body(request: TurnRequest, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
    """The client's own body, with the handle to the computed prompt if there is one."""
    body = _forwarded(request)
    return body if kv_transfer_params is None else {**body, "kv_transfer_params": kv_transfer_params}


def decode_params(
    handle: dict[str, Any] | None, *, conversation: str, salt: str, keep: Keep
) -> dict[str, Any] | None:
    """`kv_transfer_params` of the decode leg; None without a handle.

    Decode must not get parameters without a handle: a stock engine pins the blocks of such a request for good.
    """
    if not handle:
        return None
    return wire.decode_leg(
        handle,
        conversation=conversation,
        salt=salt,
        retain_s=keep.retain_s,
        protect=keep.protect,
        release=keep.release,
    )


def can_disaggregate(body: Mapping[str, Any]) -> bool:
    """Whether one prefill can serve the request.

    A handle is read by one sequence, so several choices, several prompts or beams cannot share it, and prompt log
    probabilities exist only where the prompt is computed.
    """
    if _count(body.get("n")) > 1 or _count(body.get("best_of")) > 1 or body.get("use_beam_search"):
        return False
    if body.get("prompt_logprobs") is not None or body.get("prompt_embeds") is not None:
        return False
    if body.get("echo") and body.get("logprobs") is not None:
        return False
    return not _is_batch(body.get("prompt"))


def names_media(body: Mapping[str, Any]) -> bool:
    """Whether the client gives a media item a name of its own (vLLM's `uuid`).

    Engines then take the name for the content, and nothing proves that it stands for the same content twice.
    """
    messages = body.get("messages")
    contents = (
        [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("uuid") is not None for part in parts)


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not all(type(token) is int for token in prompt)


def _forwarded(request: TurnRequest, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    body, dropped = request.body, _ROUTER_FIELDS | without
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
