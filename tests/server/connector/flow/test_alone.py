"""A turn that decode served without prefill is retained like any other, and the next one may read it back."""

import pytest
from engine_core import BLOCK, cold, text

OPENING = text(1, 100)


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("before", [True, False], ids=["after one with prefill", "first of all"])
def test_a_turn_on_decode_alone_is_read_back(start, caching, before):
    """Prompt and answer of it are pulled by the next turn's prefill, and every answer is the cold one."""
    pair = start(caching=caching)
    prompt = list(OPENING)
    if before:
        _, answer = pair.turn(prompt)
        prompt += answer.tokens + text(2, 20)
    answer = pair.decode.finish(pair.decode_alone(prompt, 40))
    assert answer.tokens == cold(prompt, 40)
    pair.quiet()
    pair.forget()
    held = len(prompt) + len(answer.tokens) - 1
    prompt += answer.tokens + text(3, 20)
    first, second = pair.turn(prompt)
    remote = held // BLOCK * BLOCK
    assert first.reuse == ("hit", remote, 0, len(prompt) - remote)
    assert second.tokens == cold(prompt, 40)
    pair.prefill.drain()
    for engine in (pair.prefill, pair.decode):
        assert engine.free_blocks == 63
