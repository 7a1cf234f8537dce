"""What clients change in a history from one request to the next without meaning another conversation.

Normalised for the router's digests only, which find conversations. Bodies go to the engines as they came, and engines
compare tokens, so nothing here can make two different prompts share KV. `docs/identity.md` has the table.
"""

from __future__ import annotations

import re
from typing import Any, Final

BILLING_LINE: Final = "x-anthropic-billing-header"
"""Begins Claude Code's attribution line, which changes with every request. vLLM 0.32 drops it from system text too."""
_BILLING: Final = re.compile(r"^x-anthropic-billing-header[^\n]*\n?", re.MULTILINE)
_BUDGET_MARK: Final = "<total_tokens>"
_BUDGET: Final = re.compile(r"\s{0,8}<total_tokens>[^<]{0,64}</total_tokens>")
"""Claude Code's token countdown: one more copy at the end of the system text with every request."""
_DAY: Final = re.compile(r"-[0-9][0-9]-[0-9][0-9]")
_TIME: Final = re.compile(
    r"[0-9][0-9][0-9][0-9](?<!\w[0-9]{4})-[0-9]{2}-[0-9]{2}"
    r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?(?: ?Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)
"""Begins with a digit and looks back from there: the engine finds digits several times faster than word boundaries, and
`_DAY`, which begins with one character, faster still. System texts are long and come with every request."""
_CACHE_MARK: Final = "cache_control"


def system_text(text: str) -> str:
    """System text without what changes by itself: attribution line, token countdown, ISO dates and times."""
    if BILLING_LINE in text:
        text = _BILLING.sub("", text)
    if _BUDGET_MARK in text:
        text = _BUDGET.sub("", text)
    return _TIME.sub("<time>", text) if _DAY.search(text) else text


def unmarked(part: Any) -> Any:
    """A content part or a tool without its cache breakpoint, which clients move along a growing history."""
    if isinstance(part, dict) and _CACHE_MARK in part:
        return {name: value for name, value in part.items() if name != _CACHE_MARK}
    return part
