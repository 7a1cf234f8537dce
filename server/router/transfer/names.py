"""Names of the transfer systems, and which of them may be combined in one vLLM `MultiConnector`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

BIDIKV: Final = "bidikv"
NIXL: Final = "nixl"
NIXL_BIDIRECTIONAL: Final = "nixl-bidirectional"
NIXL_PUSH: Final = "nixl-push"
MOONCAKE: Final = "mooncake"
LMCACHE: Final = "lmcache"

MOVERS: Final = (BIDIKV, NIXL, NIXL_BIDIRECTIONAL, NIXL_PUSH, MOONCAKE)
"""Systems that bring a prompt to the one decode engine that answers, as `kv_transfer_params` tell them."""
STORES: Final = (LMCACHE,)
"""Systems whose engines find KV by its content, wherever it was computed."""

_BASE_URL: Final = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[^/\s:@?#\[\]]+)(?::\d{1,5})?")


def parse(value: str) -> tuple[str, ...]:
    """The systems that a setting names: one, or several joined by `+`, the mover first.

    Raises:
        ValueError: One of them is unknown, or they cannot be combined.
    """
    names = tuple(part.strip() for part in value.split("+"))
    if unknown := [name for name in names if name not in MOVERS + STORES]:
        raise ValueError(f"{unknown[0]!r} is no transfer system; there are {', '.join(MOVERS + STORES)}")
    if len(set(names)) != len(names):
        raise ValueError(f"{value!r} names a system twice")
    movers = tuple(name for name in names if name in MOVERS)
    if len(movers) > 1:
        raise ValueError(
            f"{movers[0]} and {movers[1]} cannot be combined: each would fetch the same prompt, "
            "and vLLM's MultiConnector refuses their answers"
        )
    if NIXL_BIDIRECTIONAL in movers and len(names) > 1:
        raise ValueError(
            f"{NIXL_BIDIRECTIONAL} cannot be combined: its decode engines keep the blocks of every request that "
            "carries any transfer parameters"
        )
    return movers + tuple(name for name in names if name in STORES)


def base_urls(table: Mapping[str, str]) -> dict[str, str]:
    """A table of base URLs by base URLs, without slashes at their ends.

    Raises:
        ValueError: One of them is none.
    """
    cleaned = {key.rstrip("/"): value.rstrip("/") for key, value in table.items()}
    for url in (*cleaned, *cleaned.values()):
        if not _BASE_URL.fullmatch(url):
            raise ValueError(f"{url!r} is not a base URL (http://host:port)")
    return cleaned
