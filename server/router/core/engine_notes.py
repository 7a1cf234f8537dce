"""What an engine tells of itself among its metrics: load and retained tokens, read from a few lines of a long page."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(
    r"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc"
    r"|vllm:cache_config_info|bidikv:retained_tokens)"
    r"(?:\{([^\n]*)\})?[ \t]+(\S+)",
    re.MULTILINE,
)
_CACHES: Final = re.compile(r'(?:^|,)enable_prefix_caching="(True|False)"')


@dataclass(frozen=True, slots=True)
class EngineNotes:
    """Sums over an engine's data-parallel ranks, of usage the highest; None where the engine does not say.

    Attributes:
        running: Requests in its batches.
        waiting: Requests that wait for a place in one.
        kv_usage: Share of KV blocks in use by running requests, 0 to 1.
        retained_tokens: Tokens of finished turns that may be read back.
        protected_tokens: Of those, held against running requests.
        prefix_caching: It has a prefix cache of its own.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    retained_tokens: int | None = None
    protected_tokens: int | None = None
    prefix_caching: bool | None = None


def read_notes(exposition: str) -> EngineNotes:
    """Read an engine's page of metrics; lines that cannot be read are passed over."""
    found: dict[str, list[float]] = {}
    for name, labels, value in _LINE.findall(exposition):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number) and number >= 0:
            found.setdefault(name, []).append(number)
            if name == "bidikv:retained_tokens" and 'class="protected"' in labels:
                found.setdefault("protected", []).append(number)
            if name == "vllm:cache_config_info" and (said := _CACHES.search(labels)) is not None:
                found.setdefault("caches", []).append(said[1] == "True")
    usage = found.get("vllm:kv_cache_usage_perc")
    return EngineNotes(
        running=_total(found.get("vllm:num_requests_running")),
        waiting=_total(found.get("vllm:num_requests_waiting")),
        kv_usage=round(min(1.0, max(usage)), 4) if usage else None,
        retained_tokens=_total(found.get("bidikv:retained_tokens")),
        protected_tokens=_total(found.get("protected")),
        prefix_caching=all(caches) if (caches := found.get("caches")) else None,
    )


def _total(values: list[float] | None) -> int | None:
    return round(sum(values)) if values is not None else None
