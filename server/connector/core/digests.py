"""Chained digests: one per whole block, each naming every token up to the end of that block.

Two prompts whose n-th digests are equal have the same first n blocks of tokens, under the same seed. The seed
holds everything else that changes KV: engine identity, tenant salt, cache salt, adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_BYTES: Final = 32
"""SHA-256: a collision would be a wrong answer, so the length is not traded for bandwidth."""

_DOMAIN: Final = b"bidikv digest v1\0"


def seed(*parts: str) -> bytes:
    """Fold everything but the tokens that changes KV into the start of a chain. Order and empty parts count."""
    hasher = hashlib.sha256(_DOMAIN)
    for part in parts:
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little"))
        hasher.update(encoded)
    return hasher.digest()


def chain(start: bytes, token_ids: Sequence[int], *, block_size: int, blocks: int) -> list[bytes]:
    """Digests of the first `blocks` whole blocks of `token_ids`.

    Args:
        start: A `seed`.
        token_ids: Vocabulary ids, at least `blocks * block_size` of them.
        block_size: Tokens per block.
        blocks: How many digests to return.

    Raises:
        ValueError: There are fewer tokens than that.
    """
    if blocks * block_size > len(token_ids):
        raise ValueError(f"{blocks} blocks of {block_size} tokens need more than {len(token_ids)} tokens")
    packed = memoryview(array("i", token_ids[: blocks * block_size]).tobytes())
    step = block_size * array("i").itemsize
    digests: list[bytes] = []
    current = start
    for offset in range(0, blocks * step, step):
        hasher = hashlib.sha256(current)
        hasher.update(packed[offset : offset + step])
        current = hasher.digest()
        digests.append(current)
    return digests
