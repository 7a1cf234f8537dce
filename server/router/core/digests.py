"""Rolling digests of a prompt: one per prefix at which a later prompt can branch off.

They place requests; they prove nothing about tokens. The engines compare tokens, block by block, before any reuse.
A chain starts at a seed over everything that stands in front of the messages (scope, tools, template options) and
takes one step per message, or per whole chunk of a completions prompt.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NewType

from bidikv_server.router.core.json_bytes import canonical
from bidikv_server.router.core.paths import CHAT_PATH
from bidikv_server.router.core.prompts import CHUNK_CHARACTERS, CHUNK_IDS, Prompt, chat_step, read_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bidikv_server.router.core.ids import Scope

__all__ = ["CHUNK_CHARACTERS", "CHUNK_IDS", "Chain", "Digest", "chain"]

Digest = NewType("Digest", bytes)


@dataclass(frozen=True, slots=True)
class Chain:
    """Digests of one prompt.

    Attributes:
        prefixes: Shortest first; empty when the prompt is shorter than one step or has no usable shape.
        whole: Of the whole prompt, whatever its shape.
        sizes: Characters of canonical JSON up to the end of each prefix, tools and template options left out: a measure
            for a prompt's tokens.
        steps: What each prefix ends with, as `prompts` has it.
    """

    prefixes: tuple[Digest, ...]
    whole: Digest
    sizes: tuple[int, ...] = ()
    steps: Sequence[Any] = field(default=(), repr=False, compare=False)


def chain(
    body: Mapping[str, Any],
    scope: Scope,
    path: str = CHAT_PATH,
    *,
    normalise: bool = True,
    after: Digest | None = None,
) -> Chain:
    """Digests of a request's prompt.

    Args:
        body: The request's body.
        scope: Whose it is.
        path: Endpoint.
        normalise: Leave out what clients change by themselves.
        after: The whole of an earlier prompt that this one goes on from, when the body does not repeat it.
    """
    prompt = read_prompt(path, body, normalise=normalise)
    seed = _seed(prompt, scope) if after is None else after
    prefixes, sizes = _roll(seed, prompt.steps)
    if prompt.rest is None and prefixes:
        return Chain(prefixes, prefixes[-1], sizes, prompt.steps)
    return Chain(prefixes, _step(seed, canonical(prompt.rest)), sizes, prompt.steps)


def with_message(prefix: Digest, message: Mapping[str, Any]) -> Digest:
    """Digest of a chat's prefix with one more message, as it is once a client has sent it back."""
    return _step(prefix, canonical(chat_step(message)))


def _seed(prompt: Prompt, scope: Scope) -> bytes:
    identity = [prompt.kind, scope.tenant, scope.model, scope.adapter, scope.cache_salt, prompt.options]
    return hashlib.blake2b(canonical(identity), digest_size=16).digest()


def _roll(seed: bytes, steps: Iterable[Any]) -> tuple[tuple[Digest, ...], tuple[int, ...]]:
    digests: list[Digest] = []
    sizes: list[int] = []
    previous, size = seed, 0
    for step in steps:
        data = canonical(step)
        previous = _step(previous, data)
        size += len(data)
        digests.append(previous)
        sizes.append(size)
    return tuple(digests), tuple(sizes)


def _step(previous: bytes, data: bytes) -> Digest:
    return Digest(hashlib.blake2b(previous + data, digest_size=16).digest())
