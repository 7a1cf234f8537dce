"""Speculative decoding on decode: rejected drafts leave bytes in blocks that no reader may be given (F7)."""

import pytest
from engine_core import BLOCK, Pair, cold, text, unused_port

DRAFTS = 3


def guessing(good):
    """A drafter whose first `good` guesses are right, and the rest wrong."""

    def draft(tokens):
        return [*cold(tokens, good), *([7] * (DRAFTS - good))][:DRAFTS]

    return draft


@pytest.mark.parametrize("good", range(DRAFTS + 1))
@pytest.mark.parametrize("count", [*range(1, BLOCK + 2), 40])
def test_blocks_with_rejected_drafts_are_not_offered(speculating, good, count):
    """For every length of an answer and every rate of acceptance: exactly the settled blocks, with the cold answer's bytes."""
    pair = speculating
    decode, prompt = pair.decode, text(100 * count + good, 95)
    decode.device.drafter = guessing(good)
    request = decode.finish(pair.decode_alone(prompt, count, conversation=str((good, count))))
    decode.idle(2)
    assert request.tokens == cold(prompt, count)
    longer = prompt + request.tokens + text(2, 64)
    answer = pair.prefill.finish(pair.ask(longer, conversation=str((good, count))))
    assert answer.reuse[1] == (95 + count - 1) // BLOCK * BLOCK
    assert answer.tokens == cold(longer, 1)
    assert decode.free_blocks == 127
    pair.abandon()


@pytest.fixture(scope="module")
def speculating(checkpoint):
    """One pair for all: the sweep is over lengths, not over starts."""
    pair = Pair(checkpoint, port=unused_port(), drafts=DRAFTS, blocks=128)
    yield pair
    pair.close()


def wrong_on_stock(start, good):
    """Lengths of an answer after which stock prefill answers the next turn wrong."""
    wrong = []
    for count in range(1, BLOCK + 2):
        pair = start(stock=True, decode={"drafts": DRAFTS}, prefill={"drafts": DRAFTS})
        pair.decode.device.drafter = guessing(good)
        prompt = text(count, 95)
        _, answer = pair.turn(prompt, count)
        assert answer.tokens == cold(prompt, count)
        pair.forget()
        longer = prompt + answer.tokens + text(2, 64)
        first = pair.prefill.finish(pair.ask(longer, handle=answer.params))
        if first.tokens != cold(longer, 1):
            wrong.append(count)
    return wrong


def test_stock_counts_drafts_that_were_cut_off_as_part_of_the_turn(start):
    """F7: where accepted drafts run past the end of the answer, stock offers their KV for the next prompt's tokens."""
    assert wrong_on_stock(start, DRAFTS) == [2, 3, 6, 7, 10, 11, 14, 15]


def test_stock_is_right_when_every_draft_is_rejected(start):
    """VLLM 0.32 cuts lookahead blocks off a finished request's list, so that part of F7 is gone."""
    assert wrong_on_stock(start, 0) == []
