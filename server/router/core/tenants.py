"""API keys and whose they are. Only digests of keys are kept, so that nothing here can show one."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGEST_PREFIX: Final = "sha256:"
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Tenants by the digests of their API keys.

    Attributes:
        tenants: Names, by SHA-256 of a key.
    """

    tenants: Mapping[bytes, str] = field(default_factory=dict, repr=False)

    def tenant_of(self, key: str) -> str | None:
        """Whose key this is; None if nobody's.

        The digest is looked up, not the key: how long that takes says something about the digest of a guess, and
        nothing about how much of the guess is right.
        """
        return self.tenants.get(key_digest(key))

    def counts(self) -> dict[str, int]:
        """How many keys each tenant has."""
        return dict(sorted(Counter(self.tenants.values()).items()))

    def merged(self, other: KeyRing) -> KeyRing:
        """Both rings in one; where they disagree on a key, the other one's word counts."""
        return KeyRing({**self.tenants, **other.tenants})


def read_keys(table: Any) -> KeyRing:
    """Read a table of API keys, or of their digests as `sha256:` and 64 hex digits, to tenant names.

    Raises:
        ValueError: An entry is wrong. It is named by its place: the key itself is a secret.
    """
    if not isinstance(table, dict) or not table:
        raise ValueError('must be a table of at least one API key to its tenant: "key" = "tenant"')
    tenants: dict[bytes, str] = {}
    for place, (key, tenant) in enumerate(table.items(), 1):
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise ValueError(
                f"entry {place}: a tenant's name has 1 to 64 of the characters A-Z a-z 0-9 . _ - "
                "and begins with a letter or digit"
            )
        try:
            digest = digest_of(key)
        except ValueError as error:
            raise ValueError(f"entry {place}: {error}") from None
        if tenants.setdefault(digest, tenant) != tenant:
            raise ValueError(f"entry {place}: its key belongs to another tenant already")
    return KeyRing(tenants)


def digest_of(secret: Any) -> bytes:
    """SHA-256 of a secret that is given as it is or by its digest.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(secret, str) or not secret or not secret.isascii() or not secret.isprintable():
        raise ValueError("a key has one or more printable ASCII characters")
    if secret != secret.strip():
        raise ValueError("a key neither begins nor ends with a space")
    if not secret.startswith(DIGEST_PREFIX):
        return key_digest(secret)
    digits = secret.removeprefix(DIGEST_PREFIX).lower()
    if not _HEX.fullmatch(digits):
        raise ValueError(f"after {DIGEST_PREFIX} come 64 hex digits")
    return bytes.fromhex(digits)


def key_digest(key: str) -> bytes:
    """SHA-256 of a key as a client sends it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def is_key(presented: str | None, digest: bytes) -> bool:
    """Whether this is the key with that digest, in a time that tells nothing of how close a guess is."""
    return hmac.compare_digest(key_digest(presented or ""), digest)


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries: `Authorization: Bearer`, else Anthropic's `x-api-key`; None without one.

    Args:
        headers: By lower-case name.
    """
    if (authorization := headers.get("authorization")) is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() or None if scheme.lower() == "bearer" else None
    return headers.get("x-api-key") or None
