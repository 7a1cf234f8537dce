"""Turns of token ids, for models whose random words no chat template would take back, and for exact lengths."""

import json
import random
import urllib.request
import uuid

from .conftest import Player

LENGTH = 8 * 32 + 7
_WORDS = range(1000, 48000)


class TokenPlayer(Player):
    """Plays streamed completions of token ids; what was generated is sent back as it was."""

    def __init__(self, cluster):
        super().__init__(cluster)
        self.cluster = cluster

    def alone(self, prompt, *, max_tokens=24):
        """The token ids of the same request on a decode engine that computes the prompt itself: nothing is transferred."""
        body = {
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": max_tokens,
            "cache_salt": uuid.uuid4().hex,
            "return_token_ids": True,
        }
        return self._ask_decode("/v1/completions", body)["choices"][0]["token_ids"]

    def tokens(self, text):
        """The token ids of a text."""
        return self._ask_decode("/tokenize", {"prompt": text})["tokens"]

    def _ask_decode(self, path, body):
        request = urllib.request.Request(  # noqa: S310
            f"{self.cluster.decode_urls[0]}{path}",
            json.dumps({"model": self.model, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310
            return json.load(response)

    def _start(self, prompt, **options):
        return self.client.completions.create(prompt=list(prompt), **options)

    @staticmethod
    def _text(choice):
        return choice.text


def words(count, seed):
    """As many tokens, the same for the same seed."""
    return random.Random(seed).choices(_WORDS, k=count)


def turns_of_every_kind(player, seed=0):
    """One conversation's turns, each with its kind and its prompt."""
    first = words(LENGTH, seed)
    answer = player.turn(first, max_tokens=48)
    yield "first", first, answer
    second = [*first, *answer.token_ids, *words(20, seed + 1)]
    answer = player.turn(second)
    yield "faithful", second, answer
    third = [*second, *answer.token_ids, *words(20, seed + 2)]
    yield "faithful", third, player.turn(third)
    early, late = list(third), list(third)
    early[70] += 1
    late[-60] += 1
    yield "edited early", early, player.turn(early)
    yield "edited late", late, player.turn(late)
    truncated = [*third[: LENGTH + 10], *words(12, seed + 3)]
    yield "truncated", truncated, player.turn(truncated)
    yield "again", third, player.turn(third)


REUSED = {
    "first": "new_conversation",
    "faithful": "hit",
    "edited early": "hit_diverged",
    "edited late": "hit_diverged",
    "truncated": "hit",
    "again": "hit",
}
"""What becomes of each kind where readback works."""


def refused(reason):
    """What becomes of each kind where it does not."""
    return {kind: "new_conversation" if kind == "first" else reason for kind in REUSED}


def check_turns(player, reasons, seed=0):
    """Every answer is the cold run's and that of an engine alone, and says what was reused."""
    for kind, prompt, answer in turns_of_every_kind(player, seed):
        cold = player.cold(prompt, max_tokens=len(answer.token_ids))
        assert answer.token_ids, kind
        assert answer.token_ids == cold.token_ids, kind
        assert answer.token_ids == player.alone(prompt, max_tokens=len(answer.token_ids)), kind
        assert answer.reuse.reason == reasons[kind], kind
        assert (answer.reuse.remote_tokens > 0) == answer.reuse.reason.startswith("hit"), kind
