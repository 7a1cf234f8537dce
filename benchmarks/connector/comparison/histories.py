"""Conversations whose history the client changes, with questions whose answers have clear margins. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Messages = list[dict[str, Any]]

_SEA: Final = (
    "The old lighthouse stood on a rock in the sea. Every evening the keeper climbed the stairs and lit the lamp. "
    "Ships from many countries passed, and the keeper wrote their names into a book. "
)
_TOWN: Final = (
    "The new bakery opened at the corner of the square. Every morning the baker carried the flour and made the bread. "
    "People from the whole town came in, and the baker told them stories about his garden. "
)
_FARM: Final = (
    "The quiet farmer lived on a hill behind the forest. Every autumn the farmer picked the apples and fed the horses. "
    "Children from the valley walked up, and the farmer taught them the names of the birds. "
)


def _ask(text: str) -> Messages:
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": text},
    ]


@dataclass(frozen=True, slots=True)
class Divergence:
    """One conversation: what is asked first, and what the client sends after it instead of going on.

    Attributes:
        name: How the history changed.
        first: The first request.
        then: The request that does not extend what decode holds.
        between: A faithful follow-up question before it, which makes decode hold more than `then` has.
        emptied: Prefill's own cache was lost in between, to other traffic or a restart.
    """

    name: str
    first: Messages
    then: Messages
    between: str | None = None
    emptied: bool = False


_SHIPS: Final = _ask(_SEA * 6 + "What did the keeper do every evening? Tell me about the ships.")

DIVERGENCES: Final = (
    Divergence(
        "edited early",
        _ask(
            "My name is Anna and I live in Rome. "
            + _SEA * 5
            + "What is my name, and in which city do I live?"
        ),
        _ask(
            "My name is Peter and I live in Cairo. "
            + _SEA * 5
            + "What is my name, and in which city do I live?"
        ),
    ),
    Divergence(
        "edited in the middle",
        _ask(_SEA * 2 + _TOWN * 4 + "What did the baker do every morning? Tell me about the bread."),
        _ask(_SEA * 2 + _FARM * 4 + "What did the farmer do every autumn? Tell me about the hill."),
    ),
    Divergence(
        "another prompt of about the same length",
        _SHIPS,
        _ask(_TOWN * 6 + "What did the baker do every morning? Tell me about the people."),
    ),
    Divergence(
        "compacted: the middle removed",
        _ask(_SEA * 2 + _TOWN * 3 + _FARM * 4 + "What did the farmer do every autumn?"),
        _ask(_SEA * 2 + _FARM * 4 + "What did the farmer do every autumn?"),
    ),
    Divergence(
        "rewound: the first question again",
        _SHIPS,
        _SHIPS,
        between="Where did the ships come from? Name a country and describe its harbour.",
        emptied=True,
    ),
)
