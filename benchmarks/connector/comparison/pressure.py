"""Part 4, with pinning: many short conversations, more than decode has blocks for, through the whole cluster."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from comparison.calls import fan_out, page
from comparison.idle import used_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from comparison.players import Player

PATIENCE_S = 45.0
_TOKENS, _ANSWER_TOKENS, _AT_ONCE = 120, 8, 4
_BLOCKS_EACH = 4
_WORDS = range(1000, 40000)


@dataclass(frozen=True, slots=True)
class Pressure:
    """First turns of conversations that may all go on.

    Attributes:
        turns: How many were asked.
        answered: How many were answered, each within `PATIENCE_S`.
        seconds: From the first request to the last answer or the last client's giving up.
        waiting: Requests that decode kept waiting shortly before the end.
        unavailable_blocks: Blocks that count as used after it, with nothing running.
        blocks: Blocks of the engine.
        preemptions: Requests that decode preempted.
    """

    turns: int
    answered: int
    seconds: float
    waiting: int
    unavailable_blocks: int
    blocks: int
    preemptions: int


def measure(player: Player, say: Callable[[str], None]) -> Pressure:
    """Ask for half as many blocks again as decode has; clients give up after `PATIENCE_S`."""
    decode = player.cluster.decode_urls[0]
    blocks, _ = used_blocks(decode)
    turns = blocks * 3 // 2 // _BLOCKS_EACH
    before = page(decode)
    rng = Random(11)  # noqa: S311
    prompts = [[rng.choice(_WORDS) for _ in range(_TOKENS)] for _ in range(turns)]
    waiting = 0
    gave_up = False

    def ask(prompt: list[int]) -> bool:
        nonlocal waiting, gave_up
        if gave_up:
            return False
        body = {
            "model": player.cluster.model_name,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": _ANSWER_TOKENS,
            "ignore_eos": True,
            "cache_salt": uuid.uuid4().hex,
        }
        try:
            player.play(body, session=uuid.uuid4().hex, timeout_s=PATIENCE_S)
        except TimeoutError:
            waiting = max(waiting, int(page(decode).value("vllm:num_requests_waiting")))
            gave_up = True
            return False
        return True

    started_s = time.monotonic()
    answered = sum(fan_out(ask, prompts, _AT_ONCE))
    seconds = time.monotonic() - started_s
    _, unavailable = used_blocks(decode)
    name = "vllm:num_preemptions_total"
    preemptions = int(page(decode).value(name) - before.value(name))
    say(
        f"  {answered} of {turns} turns answered, then {waiting} waiting; {unavailable} of {blocks} blocks unavailable"
    )
    return Pressure(turns, answered, seconds, waiting, unavailable, blocks, preemptions)
