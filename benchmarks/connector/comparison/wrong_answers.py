"""Part 1: answers to histories that changed, and what a later plain request then finds in prefill's own cache."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bidikv_server.verify.judge import compare
from comparison.calls import CallFailedError, post
from comparison.histories import DIVERGENCES, Divergence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from comparison.players import Player

ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Judged:
    """One divergent turn and the plain request after it, both compared token for token with a cold run.

    Attributes:
        name: How the history changed.
        pulled_bytes: What prefill read from decode for the divergent turn.
        wrong: The divergent turn's answer differs from the cold run's.
        plain_wrong: So does the plain request's.
        answer: What the divergent turn said.
        plain: What the plain request said.
        cold: What the cold run said.
    """

    name: str
    pulled_bytes: float
    wrong: bool
    plain_wrong: bool
    answer: str
    plain: str
    cold: str


def measure(player: Player, say: Callable[[str], None]) -> list[Judged]:
    """Play every divergence."""
    judged = []
    for divergence in DIVERGENCES:
        judged.append(_play(player, divergence))
        last = judged[-1]
        verdicts = f"turn {_word(last.wrong)}, plain request {_word(last.plain_wrong)}"
        say(f"  {divergence.name}: {verdicts}, {last.pulled_bytes / 2**20:.1f} MiB pulled")
    return judged


def _play(player: Player, divergence: Divergence) -> Judged:
    session, salt = uuid.uuid4().hex, uuid.uuid4().hex
    model = player.cluster.model_name
    first = player.play(chat(model, divergence.first, salt), session=session)
    if divergence.between is not None:
        longer = [
            *divergence.first,
            {"role": "assistant", "content": first.answer.text},
            {"role": "user", "content": divergence.between},
        ]
        player.play(chat(model, longer, salt), session=session)
    if divergence.emptied:
        empty_prefix_cache(player.cluster.prefill_urls[0])
    then = chat(model, divergence.then, salt)
    turn = player.play(then, session=session)
    plain = player.play(then)
    cold = player.cold(then)
    return Judged(
        divergence.name,
        turn.pulled_bytes,
        compare(turn.answer, cold) is not None,
        compare(plain.answer, cold) is not None,
        turn.answer.text,
        plain.answer.text,
        cold.text,
    )


def chat(
    model: str, messages: list[dict[str, Any]], salt: str, max_tokens: int = ANSWER_TOKENS
) -> Mapping[str, Any]:
    """A greedy chat request that asks for token ids."""
    return {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "cache_salt": salt,
        "return_token_ids": True,
    }


def empty_prefix_cache(engine_url: str) -> None:
    """Forget an engine's prefix cache.

    Raises:
        CallFailedError: The engine still holds blocks of a request.
    """
    if not post(f"{engine_url}/reset_prefix_cache", {}).body["success"]:
        raise CallFailedError(f"{engine_url} could not empty its prefix cache: blocks are still held")


def _word(wrong: bool) -> str:  # noqa: FBT001
    return "WRONG" if wrong else "right"
