"""A prompt is tokenised once: prefill says which token ids it computed, and decode gets them in place of its own.

Both engines then see the same tokens by construction. The ids pass through as bytes: a long prompt has many, and nobody
here has to know one.

vLLM takes ids in `kv_transfer_params.prompt_token_ids` wherever it renders messages. It leaves out templating and
tokenising alone: tool and reasoning parsers run as ever (`renderers/online_renderer.py`, `_reused_prompt_token_ids`). A
completion takes them as its prompt. Where an answer would show that the text was never rendered, decode renders.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.router.core.json_bytes import fields_in, items_in, verbatim
from bidikv_server.router.core.paths import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELD: Final = "prompt_token_ids"
_IN_A_LIST: Final = b"0123456789, \t\r\n"
_NEEDS_TEXT: Final = {
    CHAT_PATH: ("echo", "return_prompt_text", "return_token_offsets"),
    COMPLETIONS_PATH: ("echo", "suffix", "return_token_offsets"),
    RESPONSES_PATH: ("enable_response_messages",),
}
"""Fields that put the rendered prompt into the answer, or into its making."""


class Tokenised(StrEnum):
    """Where decode's tokens of a prompt came from, for metrics."""

    ONCE = "once"
    """From prefill."""
    MEDIA = "media"
    """Its own: media have to be rendered where they are encoded."""
    NEEDS_TEXT = "needs_text"
    """Its own: the answer shows the prompt's text."""
    GIVEN = "given"
    """From the client, who sent token ids."""
    NOT_RETURNED = "not_returned"
    """Its own: prefill returned none (a stock engine, for the Responses and Messages APIs)."""
    REJECTED = "rejected"
    """Its own, after it refused prefill's."""
    OFF = "off"
    """Its own: switched off."""


def obstacle(path: str, body: Mapping[str, Any], *, has_media: bool) -> Tokenised | None:
    """Why decode has to find the tokens of this prompt itself; None if prefill's will do."""
    if any(body.get(name) for name in _NEEDS_TEXT.get(path, ())):
        return Tokenised.NEEDS_TEXT
    if path == COMPLETIONS_PATH:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            return None
        return None if isinstance(prompt, str) else Tokenised.GIVEN
    return Tokenised.MEDIA if has_media else None


def returned(answer: Mapping[str, Any], account: Mapping[str, Any]) -> bytes | None:
    """The prompt's token ids that a prefill answer says, as a JSON list; None if it says none.

    They stand where vLLM or our connector writes them, and are looked for nowhere else: the Responses API repeats a client's
    tools in its answer, and what such a tool calls token ids is not the prompt.

    Args:
        answer: The bytes of each of its fields.
        account: The same of what our connector tells.
    """
    ids = _ids(answer.get(FIELD)) or _ids(account.get(FIELD))
    if ids is None and (choices := items_in(answer.get("choices"))):
        ids = _ids(fields_in(choices[0]).get(FIELD))
    return ids


def _ids(written: Any) -> bytes | None:
    """A list of token ids as it is written; None if this is none."""
    found = bytes(written) if written is not None else b""
    inside = found[1:-1]
    is_list = found.startswith(b"[") and inside.strip() and not inside.translate(None, _IN_A_LIST)
    return found if is_list else None


def with_token_ids(path: str, body: Mapping[str, Any], ids: bytes) -> dict[str, Any]:
    """A decode leg's body with prefill's token ids in it.

    Args:
        path: Endpoint.
        body: The leg's body, `kv_transfer_params` and all.
        ids: JSON list.
    """
    if path == COMPLETIONS_PATH:
        return {**body, "prompt": verbatim(ids)}
    return {**body, "kv_transfer_params": {**body["kv_transfer_params"], FIELD: verbatim(ids)}}


def are_refused(raw: bytes) -> bool:
    """Whether an engine's error is about token ids that it was given, and not about what the client wrote."""
    return b"prompt_token_ids" in raw
