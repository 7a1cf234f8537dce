"""Which blocks are pulled, and what a partial match is called."""

import pytest

from bidikv_server.connector.core import digests, readback
from bidikv_server.connector.core.retention import Match
from bidikv_server.reasons import Reason

BLOCK = 16


def match(count, reason=Reason.HIT):
    return Match(tuple(range(100, 100 + count)), tuple([7] * count), reason)


def decide(found, local_blocks=0, threshold=64):
    return readback.decide(
        found, local_tokens=local_blocks * BLOCK, block_size=BLOCK, threshold_tokens=threshold
    )


def test_pulls_only_what_prefill_lacks():
    """Blocks under the local hit are not moved again."""
    pull = decide(match(10), local_blocks=4)
    assert pull == readback.Pull(4, tuple(range(104, 110)), (7,) * 6, Reason.HIT)


@pytest.mark.parametrize(
    ("found", "local_blocks", "expected"),
    [
        (match(0, Reason.EXPIRED), 0, Reason.EXPIRED),
        (match(0, Reason.NOT_RETAINED), 0, Reason.NOT_RETAINED),
        (match(3), 0, Reason.BELOW_THRESHOLD),
        (match(5), 5, Reason.LOCAL),
        (match(5), 9, Reason.LOCAL),
        (match(8), 5, Reason.LOCAL),
    ],
)
def test_says_why_nothing_is_pulled(found, local_blocks, expected):
    """No pull is always a reason."""
    assert decide(found, local_blocks) is expected


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (Reason.HIT, Reason.HIT),
        (Reason.DIVERGED, Reason.HIT_DIVERGED),
        (Reason.EVICTED, Reason.HIT_EVICTED),
        (Reason.EXPIRED, Reason.HIT_EVICTED),
    ],
)
def test_names_partial_hits(lost, expected):
    """A partial pull says why it was not longer."""
    assert decide(match(8, lost)).reason is expected


@pytest.mark.parametrize(("prompt", "expected"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_one_token_is_left_to_compute(prompt, expected):
    """A fully reused prompt would leave no logits to sample from."""
    assert readback.usable_blocks(prompt, BLOCK) == expected


@pytest.mark.parametrize(
    ("retained", "expected"),
    [
        (range(48, 64), 48),  # The same tokens: something else differs, from the block's start.
        ([*range(48, 53), 9, *range(54, 64)], 53),
        ([9, *range(49, 64)], 48),
        ([*range(48, 63), 9], 63),
        ([], 48),  # A peer that does not say.
    ],
)
def test_divergence_is_reported_to_the_token(retained, expected):
    """The first token of the prompt that is not what its conversation retained."""
    prompt = digests.pack(range(80))
    found = Match((0, 1, 2), (0, 0, 0), Reason.DIVERGED, digests.pack(retained))
    assert readback.diverged_at_token(found, prompt, block_size=BLOCK) == expected


def test_only_a_diverged_prompt_diverges():
    """Nobody is told of an edit that was none."""
    assert readback.diverged_at_token(match(3), b"", block_size=BLOCK) is None
    assert readback.diverged_at_token(None, b"", block_size=BLOCK) is None


@pytest.mark.parametrize(
    ("all_tokens", "computed", "in_flight", "blocks", "expected"),
    [
        (33, 32, 0, 3, 2),
        (33, 33, 1, 3, 2),  # a step is still writing the last token's KV
        (32, 32, 0, 2, 1),  # the last sampled token has no KV
        (32, 32, 1, 2, 1),
        (33, 32, 0, 1, 1),  # never more blocks than vLLM handed over
        (0, 0, 0, 0, 0),
        (5, 4, 8, 1, 0),
    ],
)
def test_retains_only_settled_whole_blocks(all_tokens, computed, in_flight, blocks, expected):
    """Blocks that hold unwritten or unsettled KV are never retained."""
    count = readback.retainable_blocks(
        all_tokens=all_tokens,
        computed_tokens=computed,
        in_flight_tokens=in_flight,
        block_size=BLOCK,
        block_ids=range(blocks),
    )
    assert count == expected
