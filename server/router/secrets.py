"""Types of the settings that hold secrets: each reads its value once, shows none of it, and fails without repeating it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf, PlainSerializer, SecretStr

from bidikv_server.router.core.tenants import DIGEST_PREFIX, KeyRing, digest_of, read_keys


def _keys(value: Any) -> KeyRing:
    if isinstance(value, KeyRing):
        return value
    if isinstance(value, str):
        raise ValueError("is a table, which no variable can hold: use the file, api_keys_file or api_key")  # noqa: TRY004  # pydantic maps it
    return read_keys(value)


def _secret(value: Any) -> SecretStr:
    secret = value if isinstance(value, SecretStr) else SecretStr(value if isinstance(value, str) else "")
    if secret.get_secret_value().startswith(DIGEST_PREFIX):
        raise ValueError("is sent, so it must be given as it is and not by its digest")
    digest_of(secret.get_secret_value())
    return secret


def _digest(value: Any) -> KeyDigest | None:
    if value is None or isinstance(value, KeyDigest):
        return value
    return KeyDigest(digest_of(value.get_secret_value() if isinstance(value, SecretStr) else value))


class KeyDigest:
    """A key that is only ever compared.

    Attributes:
        digest: Its SHA-256.
    """

    __slots__ = ("digest",)

    def __init__(self, digest: bytes) -> None:
        self.digest = digest

    def __repr__(self) -> str:
        return "KeyDigest('**********')"


def _hidden(_value: Any) -> str:
    return "**********"


Secret = Annotated[SecretStr, BeforeValidator(_secret)]
"""Sent to somebody else, so it must be given as it is."""
ComparedKey = Annotated[
    InstanceOf[KeyDigest], BeforeValidator(_digest), PlainSerializer(_hidden, when_used="unless-none")
]
"""Given as it is or as `sha256:` and its digest."""
ApiKeys = Annotated[
    InstanceOf[KeyRing], BeforeValidator(_keys), PlainSerializer(lambda ring: ring.counts(), return_type=dict)
]
"""A table of API keys, or their digests, to tenants; shown as the number of keys by tenant."""
