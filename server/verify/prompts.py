"""Texts for random conversations: plain, varied English whose continuation has clear margins. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

_PEOPLE: Final = (
    "the baker", "a young sailor", "the old gardener", "the captain", "a tired doctor", "the librarian",
    "the farmer", "a quiet painter", "the teacher", "my neighbour", "the blacksmith", "a travelling merchant",
    "the engineer", "the night watchman", "a curious child", "the violin maker",
)  # fmt: skip
_VERBS: Final = (
    "carried", "painted", "repaired", "found", "sold", "described", "measured", "borrowed", "hid", "cleaned",
    "opened", "counted", "remembered", "wrapped", "photographed", "lost",
)  # fmt: skip
_THINGS: Final = (
    "a wooden chair", "seven red apples", "the broken clock", "an iron key", "two letters", "a map of the coast",
    "the blue bicycle", "a basket of bread", "the heavy anchor", "a silver coin", "the old telescope", "a green lamp",
    "three small boats", "the town's only piano", "a jar of honey", "the longest rope",
)  # fmt: skip
_PLACES: Final = (
    "behind the mill", "in the harbour", "near the stone bridge", "at the market", "on the hill", "by the river",
    "under the clock tower", "in a cold cellar", "beside the railway", "at the edge of the forest", "in the garden",
    "on the roof", "across the square", "inside the library", "along the north road", "next to the bakery",
)  # fmt: skip
_TIMES: Final = (
    "On Monday", "Early in the morning", "Before the storm", "After dinner", "In the first week of May",
    "Last winter", "At noon", "During the festival", "Many years ago", "Every second evening", "On a rainy Sunday",
    "Shortly after midnight", "In the year 1911", "While the bells rang", "Without a word", "To everybody's surprise",
)  # fmt: skip
_QUESTIONS: Final = (
    "Who is mentioned first in this text, and what did that person do?",
    "Write one sentence that says what happened in the harbour.",
    "List three things from the text above.",
    "What is the capital of {country}, and for what is it known?",
    "Explain in simple words how a {thing} works.",
    "Count from {number} upwards, one number per line.",
    "Translate the word '{thing}' into French and use it in a sentence.",
    "Write a short poem about {thing}.",
    "What should the people in this story do next? Give a reason.",
    "Summarise the text above in one sentence.",
)
_COUNTRIES: Final = (
    "France",
    "Japan",
    "Kenya",
    "Canada",
    "Norway",
    "Egypt",
    "Italy",
    "Spain",
    "Peru",
    "India",
)
_NOUNS: Final = (
    "lighthouse",
    "clock",
    "bicycle",
    "piano",
    "telescope",
    "bridge",
    "compass",
    "mill",
    "boat",
    "lamp",
)

SYSTEM: Final = "You are a helpful assistant who answers in plain English."
SUMMARY: Final = "Write a title of at most six words for this conversation."
COLOURS: Final = ("red", "green", "blue", "yellow", "black", "white")
TOOL_NAME: Final = "choose_colour"
TOOL: Final = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Choose the colour in which the thing is painted",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": list(COLOURS)}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def passage(rng: Random, words: int) -> str:
    """About that many words of story: at least one sentence."""
    sentences: list[str] = []
    count = 0
    while count < words or not sentences:
        sentences.append(_sentence(rng))
        count += sentences[-1].count(" ") + 1
    return " ".join(sentences)


def question(rng: Random) -> str:
    """One instruction."""
    return rng.choice(_QUESTIONS).format(
        country=rng.choice(_COUNTRIES), thing=rng.choice(_NOUNS), number=rng.randrange(2, 900)
    )


def user_text(rng: Random, words: int) -> str:
    """What a user says: a passage of about that many words, then an instruction."""
    return f"{passage(rng, words)} {question(rng)}" if words >= 8 else question(rng)


def edited(rng: Random, text: str) -> str:
    """The same text with another word, sentence or ending; never the text itself."""
    words = text.split(" ")
    place = rng.randrange(len(words))
    style = rng.randrange(3)
    if style == 0:
        words[place] = f"{rng.choice(_NOUNS)}s" if words[place] != "" else "boats"
    elif style == 1:
        words.insert(place, _sentence(rng))
    else:
        words = [*words[: place + 1], "indeed."]
    changed = " ".join(words)
    return changed if changed != text else f"{text} Please."


def tool_question(rng: Random) -> str:
    """An instruction that the tool answers."""
    return f"{_sentence(rng)} Choose a colour for the {rng.choice(_NOUNS)}."


def log_uniform(rng: Random, low: int, high: int) -> int:
    """A whole number between both, small ones as likely as large ones in proportion."""
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def _sentence(rng: Random) -> str:
    who, verb, thing = rng.choice(_PEOPLE), rng.choice(_VERBS), rng.choice(_THINGS)
    return f"{rng.choice(_TIMES)}, {who} {verb} {thing} {rng.choice(_PLACES)}."
