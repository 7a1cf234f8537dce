"""Which blocks to pull for one prompt, and the account of what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.connector.core import digests
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bidikv_server.connector.core.retention import Match


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks `first` to `first + len(block_ids)` of the prompt, read from decode.

    Attributes:
        first: Blocks of the prompt that prefill already has.
        block_ids: Decode's blocks, in prompt order.
        generations: Their generations at lookup time.
        reason: What to report if the pull succeeds.
    """

    first: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    reason: Reason


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Whole blocks of a prompt that may be reused; one token is always left to compute, for the logits."""
    return max(0, prompt_tokens - 1) // block_size


def decide(match: Match, *, local_tokens: int, block_size: int, threshold_tokens: float) -> Pull | Reason:
    """Pull what decode holds beyond prefill's own hit, or say why not.

    Args:
        match: What decode holds of this prompt.
        local_tokens: Prefill's own prefix-cache hit, whole blocks.
        block_size: Tokens per block.
        threshold_tokens: Smallest gain worth a transfer; infinite if none is.
    """
    first = local_tokens // block_size
    gain = len(match.block_ids) - first
    if not match.block_ids:
        return match.reason
    if gain <= 0:
        return Reason.LOCAL
    if gain * block_size < threshold_tokens:
        return Reason.LOCAL if first else Reason.BELOW_THRESHOLD
    return Pull(first, match.block_ids[first:], match.generations[first:], _hit(match.reason))


def _hit(reason: Reason) -> Reason:
    """What a partial match is called once its blocks have been pulled."""
    if reason is Reason.DIVERGED:
        return Reason.HIT_DIVERGED
    return Reason.HIT if reason is Reason.HIT else Reason.HIT_EVICTED


def diverged_at_token(match: Match | None, tokens: bytes, *, block_size: int) -> int | None:
    """First token in which the prompt is not what its conversation retained; None if it is, or nobody knows.

    Args:
        match: What decode holds of the prompt.
        tokens: The prompt's packed tokens (`digests.pack`).
        block_size: Tokens per block.
    """
    if match is None or match.reason is not Reason.DIVERGED:
        return None
    first = len(match.block_ids) * block_size
    ours = tokens[first * digests.TOKEN_BYTES : (first + block_size) * digests.TOKEN_BYTES]
    same = digests.common_tokens(ours, match.retained)
    # Equal tokens under different digests: another medium, adapter or salt, which counts from the block's start.
    return first + (same if same < block_size else 0)


def retainable_blocks(
    *, all_tokens: int, computed_tokens: int, in_flight_tokens: int, block_size: int, block_ids: Sequence[int]
) -> int:
    """Whole leading blocks of a finished request whose KV is written and settled.

    The last sampled token has no KV yet, and a step that is still running (asynchronous scheduling) may be writing
    what it counted as computed.
    """
    settled = min(computed_tokens - in_flight_tokens, all_tokens - 1)
    return min(max(0, settled) // block_size, len(block_ids))
