"""One place out of two: what a router itself remembers of a request's conversation, and what all routers share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bidikv_server.router.core.conversations import Match, Turn


def merged(own: Match, shared: Match) -> Match:
    """The better place; at equal depth the shared one, which knows every router's turns.

    The router's own memory knows more after an outage, or when the server has lost something.

    Args:
        own: From this router's memory.
        shared: For the same request, from the shared state.
    """
    if own.key != shared.key:
        return own if _depth(own.ancestor) > _depth(shared.ancestor) else shared
    return replace(
        shared,
        ancestor=_deeper(own.ancestor, shared.ancestor),
        own=_deeper(own.own, shared.own),
        latest=shared.latest or own.latest,
    )


def _deeper(own: Turn | None, shared: Turn | None) -> Turn | None:
    return own if _depth(own) > _depth(shared) else shared


def _depth(turn: Turn | None) -> int:
    return turn.depth if turn is not None else 0
