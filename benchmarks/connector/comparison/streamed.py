"""Part 2: whether streamed turns can reuse what decode generated."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from comparison.players import Player

WARM_TURNS = 4
_FIRST_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 300, 24, 96
_WORDS = range(1000, 40000)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Warm turns of one conversation.

    Attributes:
        streamed: Whether they were streamed.
        turns: How many there were.
        pulled: For how many prefill read anything from decode.
        handles: After how many the client's side had a stock handle.
    """

    streamed: bool
    turns: int
    pulled: int
    handles: int


def measure(player: Player, say: Callable[[str], None], *, stream: bool) -> Reuse:
    """One conversation of token ids: every turn extends what decode holds, and adds more than the threshold.

    Prefill's own cache is on; what is left to pull is what decode generated.
    """
    rng = Random(7)  # noqa: S311  (the same for both)
    session, salt = uuid.uuid4().hex, uuid.uuid4().hex
    prompt = _ids(rng, _FIRST_TOKENS)
    pulled = handles = 0
    for turn in range(WARM_TURNS + 1):
        played = player.play(_body(player.cluster.model_name, prompt, salt), session=session, stream=stream)
        pulled += turn > 0 and played.pulled_bytes > 0
        handles += turn > 0 and played.handle
        prompt = [*prompt, *played.answer.token_ids, *_ids(rng, _QUESTION_TOKENS)]
    say(
        f"  {'streamed' if stream else 'not streamed'}: prefill pulled for {pulled} of {WARM_TURNS} warm turns"
    )
    return Reuse(stream, WARM_TURNS, pulled, handles)


def _body(model: str, prompt: list[int], salt: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "cache_salt": salt,
        "return_token_ids": True,
    }


def _ids(rng: Random, count: int) -> list[int]:
    return [rng.choice(_WORDS) for _ in range(count)]
