"""Types of the settings that hold secrets: each reads its value once, shows none of it, and fails without repeating it."""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

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


class StateUrl:
    """Address of a Redis or Valkey server, perhaps with a password in it.

    Attributes:
        value: As it was given.
    """

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        parts = urlsplit(value)
        if parts.scheme not in {"redis", "rediss"} or not parts.hostname:
            raise ValueError(
                "is not the address of a Redis server (redis://host:port, or rediss:// over TLS)"
            )
        if not re.fullmatch(r"/?|/\d+", parts.path) or parts.fragment:
            raise ValueError("names no database: the path is its number or nothing")
        try:
            parts.port  # noqa: B018  (raises if it is none)
        except ValueError:
            raise ValueError("has a port that is none") from None
        self.value = value

    def __str__(self) -> str:
        parts = urlsplit(self.value)
        user, at, address = parts.netloc.rpartition("@")
        name, colon, _ = user.partition(":")
        shown = f"{name}{':**********' if colon else ''}{at}{address}"
        return urlunsplit((parts.scheme, shown, parts.path, "", ""))

    def __repr__(self) -> str:
        return f"StateUrl({str(self)!r})"


def _state_url(value: Any) -> StateUrl | None:
    if value is None or isinstance(value, StateUrl):
        return value
    return StateUrl(value if isinstance(value, str) else "")


def _hidden(_value: Any) -> str:
    return "**********"


Secret = Annotated[SecretStr, BeforeValidator(_secret)]
"""Sent to somebody else, so it must be given as it is."""
ComparedKey = Annotated[
    InstanceOf[KeyDigest], BeforeValidator(_digest), PlainSerializer(_hidden, when_used="unless-none")
]
"""Given as it is or as `sha256:` and its digest."""
StateAddress = Annotated[
    InstanceOf[StateUrl], BeforeValidator(_state_url), PlainSerializer(str, when_used="unless-none")
]
"""A server's URL, shown without its password and options."""
ApiKeys = Annotated[
    InstanceOf[KeyRing], BeforeValidator(_keys), PlainSerializer(lambda ring: ring.counts(), return_type=dict)
]
"""A table of API keys, or their digests, to tenants; shown as the number of keys by tenant."""
