"""What prefill answers: the handle to the computed prompt, and its account of reuse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bidikv.headers import ReuseHeader
from bidikv_server import wire
from bidikv_server.reasons import Reason
from bidikv_server.router.core import prompt_tokens
from bidikv_server.router.core.json_bytes import encode, fields_in, read_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_INPUT_TOKENS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """One prefill leg's outcome.

    Attributes:
        handle: `kv_transfer_params` for decode, without our own part; None if prefill offers nothing to pull.
        reuse: What became of the prompt, as prefill tells it.
        token_ids: The prompt's, as a JSON list; None if prefill did not say them.
        cached_tokens: Prompt tokens that vLLM did not compute, whoever had them; None unless the engine was started with
            --enable-prompt-tokens-details.
    """

    handle: dict[str, Any] | None
    reuse: ReuseHeader
    token_ids: bytes | None = None
    cached_tokens: int | None = None


NOTHING_KNOWN = PrefillAnswer(None, ReuseHeader(Reason.UNKNOWN))
"""Stands for a prefill leg that did not run."""


def read_prefill_answer(raw: bytes) -> PrefillAnswer:
    """Read the body of a prefill answer with status 200.

    Raises:
        ValueError: It is not what vLLM answers.
    """
    answer = fields_in(raw)
    if not answer:
        raise ValueError("not a JSON object")
    params = fields_in(answer.get("kv_transfer_params"))
    account = fields_in(params.pop(wire.KEY, None))
    token_ids = prompt_tokens.returned(answer, account)
    account.pop(prompt_tokens.FIELD, None)
    told, handle = read_value(encode(account)), read_value(encode(params))
    usage = read_value(answer["usage"]) if "usage" in answer else None
    return PrefillAnswer(
        handle or None, _reuse(told, _prompt_tokens(usage)), token_ids, _cached_tokens(usage)
    )


def with_reason(reuse: ReuseHeader, decided: Reason | None) -> ReuseHeader:
    """The account under the router's own reason, if it decided one."""
    if decided is None:
        return reuse
    return ReuseHeader(
        reason=decided,
        prompt_tokens=reuse.prompt_tokens,
        remote_tokens=reuse.remote_tokens,
        local_tokens=reuse.local_tokens,
        computed_tokens=reuse.computed_tokens,
        diverged_at_token=reuse.diverged_at_token,
    )


def of_decode_alone(reuse: ReuseHeader, usages: Iterable[Mapping[str, Any]]) -> ReuseHeader:
    """The account of a turn that decode did alone, with what its answer says of the prompt.

    Args:
        reuse: With the reason.
        usages: What the answer says of its tokens, the newest first.
    """
    for usage in usages:
        if (prompt := _prompt_tokens(usage)) is not None:
            cached = _cached_tokens(usage)
            return replace(
                reuse,
                prompt_tokens=prompt,
                remote_tokens=None if cached is None else 0,
                local_tokens=cached,
                computed_tokens=None if cached is None else max(0, prompt - cached),
            )
    return reuse


def _reuse(account: Mapping[str, Any], prompt_tokens: int | None) -> ReuseHeader:
    if account.get("v") != wire.VERSION:
        return ReuseHeader(Reason.UNKNOWN, prompt_tokens=prompt_tokens)
    counted = _tokens(account, "prompt_tokens")
    return ReuseHeader(
        reason=_reason(account.get("reason")),
        prompt_tokens=prompt_tokens if counted is None else counted,
        remote_tokens=_tokens(account, "remote_tokens"),
        local_tokens=_tokens(account, "local_tokens"),
        computed_tokens=_tokens(account, "computed_tokens"),
        diverged_at_token=_tokens(account, "diverged_at_token"),
    )


def _reason(value: Any) -> Reason:
    try:
        return Reason(value)
    except ValueError:
        return Reason.UNKNOWN


def _prompt_tokens(usage: Any) -> int | None:
    if not isinstance(usage, dict):
        return None
    if "prompt_tokens" in usage:
        return _tokens(usage, "prompt_tokens")
    # The Messages API counts apart what was found in a cache or written to one.
    counts = [_tokens(usage, name) for name in _INPUT_TOKENS]
    return None if counts[0] is None else sum(count or 0 for count in counts)


def _cached_tokens(usage: Any) -> int | None:
    if not isinstance(usage, dict):
        return None
    for name in _DETAILS:
        if isinstance(details := usage.get(name), dict):
            return _tokens(details, "cached_tokens")
    return _tokens(usage, _INPUT_TOKENS[1])


def _tokens(counts: Mapping[str, Any], name: str) -> int | None:
    value = counts.get(name)
    return value if type(value) is int and value >= 0 else None
