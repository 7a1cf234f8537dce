"""Who a request belongs to, and the opaque names that engines see instead."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from typing import Final, NewType

ConversationKey = NewType("ConversationKey", str)
"""32 hex characters: the name of a conversation on the wire and in the table."""
EngineUrl = NewType("EngineUrl", str)
"""An engine's base URL, as configured."""

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""What may become an engine's request id. NIXL's heartbeats join ids with commas and colons: an id that holds one would
not be found again, and its blocks be freed before decode has read them."""

_LONGEST_KEPT: Final = 256
"""Of what a client makes up, in characters: a body may hold a salt of megabytes, which nobody should remember."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything that must be equal before two requests may share KV.

    Attributes:
        tenant: Name of the tenant whose API key the client presented. While no API keys are configured, digest of the
            credential it presented, empty without one.
        model: Model name as the client wrote it.
        adapter: Adapter on top of the model. vLLM addresses adapters by model name, so it is empty unless resolved.
        cache_salt: The client's own separation within its tenant; empty without one.
    """

    tenant: str
    model: str
    adapter: str = ""
    cache_salt: str = ""


def tenant_of(authorization: str | None) -> str:
    """Tenant of a request, by the credential it carries; the credential itself is not kept."""
    return fingerprint("tenant", authorization) if authorization else ""


def cache_salt_of(tenant: str, cache_salt: str) -> str:
    """Salt of an engine's own prefix cache, which would serve one tenant's blocks to another otherwise."""
    return fingerprint("cache_salt", tenant, cache_salt)


def salt_of(scope: Scope) -> str:
    """Salt of the engines' block digests: equal text of two tenants never matches."""
    if len(scope.cache_salt) > _LONGEST_KEPT:
        return fingerprint("salt", scope.tenant, scope.cache_salt)
    return _salt(scope.tenant, scope.cache_salt)


@functools.lru_cache(maxsize=1024)
def _salt(tenant: str, cache_salt: str) -> str:
    return fingerprint("salt", tenant, cache_salt)


def session_key(scope: Scope, session: str) -> ConversationKey:
    """Key of the conversation that the client named."""
    return ConversationKey(fingerprint("session", *_parts(scope), session))


def chain_key(scope: Scope, root: str) -> ConversationKey:
    """Key of a conversation without a name; `root` is the digest of its first prompt."""
    return ConversationKey(fingerprint("chain", *_parts(scope), root))


def accept_request_id(value: str | None) -> str | None:
    """A client's request id, if engines and logs can carry it."""
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None


def fingerprint(*parts: str) -> str:
    """32 hex characters over the parts; their lengths count, so ("ab", "c") differs from ("a", "bc")."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def _parts(scope: Scope) -> tuple[str, ...]:
    return scope.tenant, scope.model, scope.adapter, scope.cache_salt
