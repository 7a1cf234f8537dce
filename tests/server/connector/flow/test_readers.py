"""Many readers of one retained turn, at once, while decode's pool goes on handing out."""

import pytest
from engine_core import BLOCK, cold, text

OPENING = text(1, 100)


def history(pair):
    """A conversation's second prompt, nothing of it left on prefill."""
    _, answer = pair.turn(OPENING)
    pair.forget()
    return OPENING + answer.tokens


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_retry_hedge_and_fork_read_the_same_blocks_at_once(start, caching, asynchronous):
    """Readers do not consume (F3): each gets the blocks that are its own prefix, and its own cold answer."""
    pair = start(caching=caching, asynchronous=asynchronous, blocks=160)
    prompt = history(pair)
    prompts = {"first": prompt + text(2, 20)}
    prompts |= {"retry": prompts["first"], "hedge": prompts["first"]}
    prompts |= {f"fork {n}": prompt[: 128 - 10 * n] + text(n + 10, 30) for n in range(4)}
    prefill = pair.prefill
    prefill.transport.hold = "read"
    for name, tokens in prompts.items():
        pair.ask(tokens, name=name)
    prefill.run(until=lambda: len(prefill.transport.pairs) == len(prompts))
    prefill.transport.hold = None
    prefill.finish(*prompts)
    read = {name: [remote for _, remote in pairs] for name, pairs in prefill.transport.pairs.items()}
    held = pair.decode.device.table(pair.decoded)
    for name, tokens in prompts.items():
        answer = prefill.answers[name]
        assert answer.tokens == cold(tokens, 1)
        common = next(
            (i for i, pair_ in enumerate(zip(tokens, prompt, strict=False)) if pair_[0] != pair_[1]), 139
        )
        blocks = min(common, 139) // BLOCK
        assert answer.reuse == (answer.reuse[0], blocks * BLOCK, 0, len(tokens) - blocks * BLOCK)
        assert answer.reuse[0] == ("hit" if blocks == 8 else "hit_diverged")
        assert read[name] == held[:blocks]
    written = [local for pairs in prefill.transport.pairs.values() for local, _ in pairs]
    assert len(written) == len(set(written))
    decoded = [
        pair.reply(tokens, 12, prefill.answers[name], conversation=name) for name, tokens in prompts.items()
    ]
    pair.decode.finish(*decoded)
    for request, tokens in zip(decoded, prompts.values(), strict=True):
        assert pair.decode.answers[request].tokens == cold(tokens, 12)


def test_a_turn_can_be_read_again_and_again(start):
    """Reading is no renewal and no use: the tenth reader gets what the first got."""
    pair = start()
    prompt = history(pair) + text(2, 20)
    for _ in range(10):
        answer = pair.prefill.finish(pair.ask(prompt))
        assert (answer.reuse, answer.tokens) == (("hit", 128, 0, 32), cold(prompt, 1))
        pair.abandon()
        pair.forget()


@pytest.mark.parametrize("hold", ["read", "validation"])
@pytest.mark.parametrize("taken", [40, 55, 57, 62])
def test_readers_while_decodes_pool_hands_out(start, taken, hold):
    """Of readers under way, those whose blocks decode took recompute; nobody answers from another's bytes."""
    pair = start()
    prompt = history(pair)
    prompts = [prompt[: 128 - 30 * n] + text(n + 10, 40) for n in range(4)]
    prefill, decode = pair.prefill, pair.decode
    prefill.transport.hold = hold
    requests = [pair.ask(tokens) for tokens in prompts]
    prefill.run(until=lambda: len(prefill.transport.pairs) == len(prompts))
    prefill.idle(1)
    before = decode.free_blocks
    rival = decode.add(text(8, taken * BLOCK - 1), 1, None)
    decode.finish(rival)
    gone = set(decode.device.table(rival))
    prefill.transport.hold = None
    prefill.finish(*requests)
    assert before == 63
    for request, tokens in zip(requests, prompts, strict=True):
        answer = prefill.answers[request]
        lost = bool(gone & {remote for _, remote in prefill.transport.pairs[request]})
        assert (answer.reuse[0] == "validation_failed") == lost
        assert answer.tokens == cold(tokens, 1)
    assert decode.answers[rival].tokens == cold(text(8, taken * BLOCK - 1), 1)
    verdicts = {prefill.answers[request].reuse[0] for request in requests}
    assert ("validation_failed" in verdicts) == (taken > 55)
