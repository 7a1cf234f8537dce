"""The retention index behind one lock: written by the engine core's thread, asked by the index thread."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.connector import messages
from bidikv_server.connector.core.retention import RetentionIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from bidikv_server.connector.core.digests import Chain

_SWEEP_EVERY_S: Final = 0.5
_SLICE_DIGESTS: Final = 256
_SLICES_PER_SWEEP: Final = 64


class IndexService:
    """Answers side-channel messages. Every method may be called from either thread."""

    def __init__(
        self,
        identity: str,
        connection: dict[str, Any],
        num_blocks: int,
        *,
        max_ttl_s: float = math.inf,
        registration: Callable[[], int] = lambda: 0,
    ) -> None:
        """Serve an empty index.

        Args:
            identity: What a peer must share with this engine.
            connection: What vLLM's NIXL pull needs to reach this engine's blocks; fields of `messages.Found`.
            num_blocks: Blocks of the pool.
            max_ttl_s: The longest time that a peer may renew for.
            registration: How often the engine has registered its memory anew by now.
        """
        self._registration = registration
        self._max_ttl_s = max_ttl_s
        self._identity = identity
        self._connection = connection
        # Generations start anew with every engine start; the epoch tells readers which start they belong to.
        self._epoch = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._index = RetentionIndex(num_blocks)
        self._asked: Counter[str] = Counter()
        # What peers asked for and the engine's thread has not heard of yet: None releases, a time renews until then.
        self._changes: dict[str, float | None] = {}
        self._next_sweep_s = 0.0
        self._answers: dict[type, Callable[[Any], bytes | None]] = {
            messages.Lookup: self._look_up,
            messages.Validate: self._validate,
            messages.Renew: self._renew,
            messages.Release: self._release,
        }

    def retain(
        self,
        conversation: str,
        chain: Chain,
        block_ids: Sequence[int],
        *,
        ttl_s: float,
        complete: bool = True,
        keep: Container[int] = (),
    ) -> None:
        """Record a finished turn, as `RetentionIndex.retain` does."""
        with self._lock:
            if complete:
                self._changes.pop(conversation, None)
            self._index.retain(
                conversation,
                chain.digests,
                block_ids,
                now_s=time.monotonic(),
                ttl_s=ttl_s,
                tokens=chain.tokens,
                complete=complete,
                keep=keep,
            )

    def release(self, conversation: str) -> None:
        """Forget a conversation that has ended."""
        with self._lock:
            self._index.release(conversation)

    def take_changes(self) -> dict[str, float | None]:
        """Conversations that peers released (None) or renewed (until when) since the last call."""
        if not self._changes:
            return {}
        with self._lock:
            changes, self._changes = self._changes, {}
            return changes

    def sweep(self) -> None:
        """Drop what has expired, in slices, so that neither the engine nor a lookup waits long for the lock."""
        now_s = time.monotonic()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _SWEEP_EVERY_S
        for _ in range(_SLICES_PER_SWEEP):
            with self._lock:
                if self._index.expire(now_s, limit=_SLICE_DIGESTS) < _SLICE_DIGESTS:
                    return

    def reused(self, block_id: int) -> None:
        """The pool handed this block out."""
        with self._lock:
            self._index.reused(block_id)

    def take_counts(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Messages by kind and lost digests by cause since the last call, and digests held now."""
        with self._lock:
            asked, self._asked = self._asked, Counter()
            return dict(asked), self._index.take_losses(), len(self._index)

    def answer(self, data: bytes) -> bytes | None:
        """Serve one message; what cannot be read gets no answer."""
        message = messages.decode(data)
        # An older peer's messages may have other fields: it is told what is wrong instead of being left to time out.
        version = message.v if message is not None else messages.version_of(data)
        if version not in {None, messages.VERSION}:
            return self._refuse(f"decode speaks version {messages.VERSION}, its peer {version}")
        answer = self._answers.get(type(message))
        reply = answer(message) if answer is not None else None
        if reply is None:
            self._count("malformed")
        return reply

    def _look_up(self, message: messages.Lookup) -> bytes | None:
        wanted = messages.split_digests(message.digests)
        if wanted is None:
            return None
        if message.identity != self._identity:
            return self._refuse("the engines differ in model, dtype, block size or speculation")
        self._count("lookup")
        with self._lock:
            match = self._index.lookup(message.conversation, wanted, now_s=time.monotonic())
        return messages.encode(
            messages.Found(
                v=messages.VERSION,
                epoch=self._epoch,
                block_ids=list(match.block_ids),
                generations=list(match.generations),
                reason=match.reason,
                retained=match.retained,
                **self._connection,
                registration=self._registration(),
            )
        )

    def _validate(self, message: messages.Validate) -> bytes:
        self._count("validate")
        with self._lock:
            valid = message.epoch == self._epoch and self._index.valid(message.block_ids, message.generations)
        return messages.encode(messages.Verdict(messages.VERSION, valid))

    def _renew(self, message: messages.Renew) -> bytes | None:
        if not message.ttl_s > 0:
            return None
        self._count("renew")
        now_s = time.monotonic()
        ttl_s = min(message.ttl_s, self._max_ttl_s)
        with self._lock:
            known = self._index.renew(message.conversation, now_s=now_s, ttl_s=ttl_s)
            if known:
                self._changes[message.conversation] = now_s + ttl_s
        return messages.encode(messages.Verdict(messages.VERSION, known))

    def _release(self, message: messages.Release) -> bytes:
        self._count("release")
        with self._lock:
            known = self._index.release(message.conversation)
            if known:
                self._changes[message.conversation] = None
        return messages.encode(messages.Verdict(messages.VERSION, known))

    def _refuse(self, why: str) -> bytes:
        self._count("refused")
        return messages.encode(messages.Refused(messages.VERSION, why))

    def _count(self, kind: str) -> None:
        with self._lock:
            self._asked[kind] += 1


def refuse_all(why: str) -> Callable[[bytes], bytes]:
    """The index of an engine that retains nothing: whoever asks is told so at once, instead of waiting in every turn."""
    refusal = messages.encode(messages.Refused(messages.VERSION, why))
    return lambda _: refusal
