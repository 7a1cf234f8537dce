"""Messages of the side channel between a prefill engine and a decode engine's retention index (msgpack).

Version history (bump when a field changes meaning or a required one is added; peers of other versions are told so):
1  first
2  Found says which tokens the conversation retained where a prompt diverges; Renew and Release
"""

from __future__ import annotations

from typing import Final

import msgspec

from bidikv_server.connector.core.digests import DIGEST_BYTES

VERSION: Final = 2
MAX_MESSAGE_BYTES: Final = 8 << 20
"""Room for the digests of four million tokens in 16-token blocks; anything larger is refused unread."""


class Lookup(msgspec.Struct, frozen=True, tag="lookup", array_like=True):
    """Prefill asks: how many of these digests, in order, do you hold?

    Attributes:
        v: Protocol version.
        identity: Digest of everything that must be equal for two engines to exchange blocks.
        conversation: Opaque key, only used to explain a miss.
        digests: Concatenated digests.
    """

    v: int
    identity: str
    conversation: str
    digests: bytes


class Found(msgspec.Struct, frozen=True, tag="found", array_like=True):
    """Decode answers a `Lookup`. The fields after `retained` are what vLLM's NIXL pull needs to reach decode's blocks.

    Attributes:
        v: Protocol version.
        epoch: Which start of the index promises the blocks.
        block_ids: Decode's blocks, in prompt order.
        generations: Their generations.
        reason: Of `Reason`.
        retained: When the prompt diverged: the packed tokens of the block that the conversation retained instead.
        registration: How often decode registered its memory anew (vLLM 0.33: after a sleep); readers must know the last.
    """

    v: int
    epoch: str
    block_ids: list[int]
    generations: list[int]
    reason: str
    retained: bytes
    engine_id: str
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int
    registration: int = 0


class Validate(msgspec.Struct, frozen=True, tag="validate", array_like=True):
    """Prefill asks after its read: is every block still the one you promised?"""

    v: int
    epoch: str
    block_ids: list[int]
    generations: list[int]


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """The conversation comes back later than it said: keep what its last turn left.

    Attributes:
        v: Protocol version.
        conversation: Opaque key.
        ttl_s: From now; at most the engine's own maximum.
    """

    v: int
    conversation: str
    ttl_s: float


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """The conversation has ended: forget what no other one is made of."""

    v: int
    conversation: str


class Verdict(msgspec.Struct, frozen=True, tag="verdict", array_like=True):
    """Decode answers a `Validate`, or whether a `Renew` or `Release` found its conversation."""

    v: int
    valid: bool


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """Decode cannot serve this peer: another version, model, block size or layout."""

    v: int
    message: str


Message = Lookup | Found | Validate | Renew | Release | Verdict | Refused


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What every version's messages begin with. What follows is skipped, not built: it may be anything."""

    kind: str
    v: int


# Nested too deeply is an error of its own.
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_head_decoder = msgspec.msgpack.Decoder(_Head)


def encode(message: Message) -> bytes:
    """Message to wire bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message | None:
    """Wire bytes to message; None for anything malformed, oversized or unknown."""
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        return _decoder.decode(data)
    except _UNREADABLE:
        return None


def version_of(data: bytes | memoryview) -> int | None:
    """Protocol version of a message that cannot be decoded otherwise; None if it is none of this protocol."""
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        return _head_decoder.decode(data).v
    except _UNREADABLE:
        return None


def split_digests(joined: bytes) -> list[bytes] | None:
    """The digests of a `Lookup`; None when their length is not a whole number of digests."""
    if len(joined) % DIGEST_BYTES:
        return None
    return [joined[offset : offset + DIGEST_BYTES] for offset in range(0, len(joined), DIGEST_BYTES)]
