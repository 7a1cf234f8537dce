"""The account of a turn where no engine writes one: from the engine's own usage, and from what placement decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bidikv.headers import ReuseHeader
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from bidikv_server.router.core.accounts import PrefillAnswer

_OF_A_LOOKUP: Final = frozenset({Reason.NEW_CONVERSATION, Reason.NO_INDEX, Reason.DECODE_CHANGED})
"""Why no retention index is asked: says nothing where there is none to ask."""


def cached_only(prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
    """The account where nothing comes back from decode: what prefill did not compute, it had."""
    cached = prefilled.cached_tokens
    return _account(prefilled, _reason(decided, Reason.NO_ACCOUNT), remote=0, local=cached)


def unaccounted(prefilled: PrefillAnswer, decided: Reason | None, reason: Reason) -> ReuseHeader:
    """The account where nobody says whether cached tokens were prefill's own."""
    return _account(prefilled, _reason(decided, reason), remote=None, local=None)


def _reason(decided: Reason | None, otherwise: Reason) -> Reason:
    return otherwise if decided is None or decided in _OF_A_LOOKUP else decided


def _account(
    prefilled: PrefillAnswer, reason: Reason, *, remote: int | None, local: int | None
) -> ReuseHeader:
    prompt, cached = prefilled.reuse.prompt_tokens, prefilled.cached_tokens
    computed = prompt - cached if prompt is not None and cached is not None else None
    if prompt is None:
        remote = None
    return ReuseHeader(reason, prompt, remote, local, computed)
