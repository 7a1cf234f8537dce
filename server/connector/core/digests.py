"""Chained digests: one per whole block, each naming every token up to the end of that block.

Two prompts whose n-th digests are equal have the same first n blocks of tokens and media, under the same seed. The
seed holds everything else that changes KV: engine identity, tenant salt, cache salt, adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DIGEST_BYTES: Final = 32
"""SHA-256: a collision would be a wrong answer, so the length is not traded for bandwidth. Faster hashes were measured
(`benchmarks/README.md`); not to hash what is known already gains more than any of them."""
TOKEN_BYTES: Final = array("i").itemsize

_DOMAIN: Final = b"bidikv digest v2\0"
_MEDIA: Final = b"\0media\0"


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's digests and what they were made of.

    Attributes:
        start: The seed.
        digests: One per whole block.
        tokens: The same blocks' token ids, packed: `TOKEN_BYTES` each, in the machine's byte order.
        media: What was folded in beside the tokens, by block.
    """

    start: bytes
    digests: tuple[bytes, ...]
    tokens: bytes
    media: Mapping[int, bytes]


def seed(*parts: str) -> bytes:
    """Fold everything but tokens and media that changes KV into the start of a chain. Order and empty parts count."""
    return hashlib.sha256(_DOMAIN + _framed(parts)).digest()


def media_marks(items: Sequence[tuple[str, int, int]], block_size: int) -> dict[int, bytes]:
    """What media items add to the digest of the block that each begins in; later blocks have it through the chain.

    Args:
        items: Content hash, first placeholder token and number of placeholder tokens of each item.
        block_size: Tokens per block.
    """
    marks: dict[int, bytes] = {}
    for content, first, length in sorted(items, key=lambda item: (item[1], item[0])):
        block = first // block_size
        marks[block] = marks.get(block, b"") + _framed((content, str(first), str(length)))
    return marks


def pack(token_ids: Sequence[int]) -> bytes:
    """Vocabulary ids as bytes, `TOKEN_BYTES` each."""
    return array("i", token_ids).tobytes()


def chain(
    start: bytes,
    token_ids: Sequence[int],
    *,
    block_size: int,
    blocks: int,
    media: Mapping[int, bytes] | None = None,
    known: Chain | None = None,
) -> Chain:
    """Digests of the first `blocks` whole blocks of `token_ids`.

    Args:
        start: A `seed`.
        token_ids: Vocabulary ids, at least `blocks * block_size` of them.
        block_size: Tokens per block.
        blocks: How many digests to return.
        media: `media_marks` of the prompt.
        known: An earlier chain in blocks of the same size; what both begin with is not hashed again.

    Raises:
        ValueError: There are fewer tokens than that.
    """
    if blocks * block_size > len(token_ids):
        raise ValueError(f"{blocks} blocks of {block_size} tokens need more than {len(token_ids)} tokens")
    tokens = pack(token_ids[: blocks * block_size])
    marks = {block: mark for block, mark in (media or {}).items() if block < blocks}
    step = block_size * TOKEN_BYTES
    common = _common_blocks(known, start, tokens, marks, step) if known is not None else 0
    digests = list(known.digests[:common]) if known is not None else []
    current = digests[-1] if digests else start
    sha256 = hashlib.sha256
    for block in range(common, blocks):
        mark = _MEDIA + marks[block] if block in marks else b""
        current = sha256(current + tokens[block * step : (block + 1) * step] + mark).digest()
        digests.append(current)
    return Chain(start, tuple(digests), tokens, marks)


class ChainMemory:
    """The last chain of each conversation, so that its next turn hashes only what it adds. One thread only."""

    def __init__(self, max_tokens: int) -> None:
        """Remember chains of at most `max_tokens` tokens together; the longest unused are forgotten first."""
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._bytes = 0
        self._chains: OrderedDict[str, Chain] = OrderedDict()

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._chains)

    def get(self, conversation: str) -> Chain | None:
        """A conversation's last chain."""
        return self._chains.get(conversation)

    def put(self, conversation: str, made: Chain) -> None:
        """Remember a chain in place of its conversation's earlier one."""
        self.forget(conversation)
        self._chains[conversation] = made
        self._bytes += len(made.tokens)
        while self._bytes > self._max_bytes:
            self.forget(next(iter(self._chains)))

    def forget(self, conversation: str) -> None:
        """Drop a conversation."""
        dropped = self._chains.pop(conversation, None)
        self._bytes -= len(dropped.tokens) if dropped is not None else 0


def common_tokens(ours: bytes, theirs: bytes) -> int:
    """How many packed tokens two sequences begin with in common."""
    count = min(len(ours), len(theirs)) // TOKEN_BYTES
    ends = range(TOKEN_BYTES, (count + 1) * TOKEN_BYTES, TOKEN_BYTES)
    return next(
        (n for n, end in enumerate(ends) if ours[end - TOKEN_BYTES : end] != theirs[end - TOKEN_BYTES : end]),
        count,
    )


def _common_blocks(known: Chain, start: bytes, tokens: bytes, marks: Mapping[int, bytes], step: int) -> int:
    """Leading whole blocks that are the same in tokens, media and seed."""
    if known.start != start:
        return 0
    low, high = 0, min(len(known.tokens), len(tokens)) // step
    if known.tokens[: high * step] != tokens[: high * step]:
        while low < high - 1:
            middle = (low + high) // 2
            if known.tokens[low * step : middle * step] == tokens[low * step : middle * step]:
                low = middle
            else:
                high = middle
        high = low
    differing = [block for block in {*marks, *known.media} if marks.get(block) != known.media.get(block)]
    return min([high, *differing])


def _framed(parts: Sequence[str]) -> bytes:
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)
