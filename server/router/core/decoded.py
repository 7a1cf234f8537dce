"""What a stock decode engine's whole answer tells: its handle, and which tokens the handle's blocks hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEEDED: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Without any of these vLLM fetches nothing."""
_EXPIRY: Final = "remote_blocks_expiry_time"
"""Without it prefill reads blocks whose time is up."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One turn's end on a bidirectional decode engine.

    Attributes:
        params: `kv_transfer_params` as decode returned them, for one group of blocks.
        token_ids: Prompt and answer.
        computed_tokens: How many of them decode's blocks hold.
        message: The answer of a chat as a client sends it back; None for a completion.
    """

    params: Mapping[str, Any]
    token_ids: list[int]
    computed_tokens: int
    message: Mapping[str, Any] | None


def read_decoded(raw: bytes) -> Decoded | None:
    """Read decode's answer; None if it returns no handle, or not all that is needed to prove what the handle holds."""
    try:
        answer = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    params, choice = answer.get("kv_transfer_params"), _only_choice(answer.get("choices"))
    if choice is None or not _is_handle(params):
        return None
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    generated, message = choice.get("token_ids"), choice.get("message")
    if not _is_ids(prompt) or not _is_ids(generated):
        return None
    token_ids, computed = [*prompt, *generated], params["remote_num_tokens"]
    if computed > len(token_ids):
        return None
    return Decoded(params, token_ids, computed, _sent_back(message) if isinstance(message, dict) else None)


def _only_choice(choices: Any) -> dict[str, Any] | None:
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    return choices[0]


def _is_handle(params: Any) -> TypeGuard[dict[str, Any]]:
    """A handle of one group of blocks, for which vLLM checks the expiry. Sliding windows and states make more groups."""
    if not isinstance(params, dict) or params.get("do_remote_decode") is not True:
        return False
    if any(params.get(name) is None for name in _NEEDED) or not isinstance(params.get(_EXPIRY), float):
        return False
    groups, computed = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if not isinstance(groups, list) or len(groups) != 1 or not _is_ids(groups[0]):
        return False
    return type(computed) is int and computed > 0


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _sent_back(message: dict[str, Any]) -> dict[str, Any]:
    """Clients leave out what is null, and a list of no tool calls."""
    return {name: value for name, value in message.items() if value is not None and value != []}
