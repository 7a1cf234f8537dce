"""Wire ids of conversations: keyed hashes, so that no name of a user, thread or ticket is ever sent (standard library only)."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Final, TypeAlias
from uuid import UUID

from bidikv.errors import ConfigurationError

Key: TypeAlias = "str | int | bytes | UUID | tuple[Key, ...]"
"""What a caller may call a conversation."""

_DEFAULT_SECRET: Final = b"bidikv conversation id"
_DIGEST_BYTES: Final = 16  # 128 bits are 26 characters of base32


def session_id(*parts: Key, secret: bytes | None = None) -> str:
    """The wire id that belongs to these parts: `c_` and 26 characters, the same in every process.

    Args:
        parts: What the caller calls the conversation. They do not appear on the wire.
        secret: Keys the hash (64 bytes at most), so that someone who sees ids cannot try out names.

    Raises:
        ConfigurationError: A part has a type without one stable spelling, or the secret is too long.
    """
    try:
        digest = hashlib.blake2b(
            _encode(parts), key=secret or _DEFAULT_SECRET, digest_size=_DIGEST_BYTES
        ).digest()
    except ValueError as error:
        raise ConfigurationError(f"cannot derive a conversation id: {error}") from error
    return _wire_id(digest)


def random_id() -> str:
    """A wire id that nobody has had before."""
    return _wire_id(secrets.token_bytes(_DIGEST_BYTES))


def _encode(part: Key) -> bytes:
    """Spell a part so that no two different parts are spelt alike."""
    if isinstance(part, tuple):
        tag, body = b"t", b"".join(_encode(member) for member in part)
    elif isinstance(part, str):
        tag, body = b"s", part.encode("utf-8", "surrogatepass")
    elif isinstance(part, bytes):
        tag, body = b"b", part
    elif isinstance(part, UUID):
        tag, body = b"u", part.bytes
    elif isinstance(part, int):
        tag, body = b"i", str(int(part)).encode()
    else:
        raise ConfigurationError(
            f"a conversation key is text, a number, bytes or a UUID, not {type(part).__name__}"
        )
    return b"%b%d:%b" % (tag, len(body), body)


def _wire_id(digest: bytes) -> str:
    return "c_" + base64.b32encode(digest).decode().rstrip("=").lower()
