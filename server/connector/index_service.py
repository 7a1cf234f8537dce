"""The retention index behind one lock: written by the engine core's thread, asked by the index thread."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

from bidikv_server.connector import messages
from bidikv_server.connector.core.retention import RetentionIndex

if TYPE_CHECKING:
    from collections.abc import Sequence


class IndexService:
    """Answers side-channel messages. Every method may be called from either thread."""

    def __init__(self, identity: str, connection: dict[str, Any], num_blocks: int) -> None:
        """Serve an empty index.

        Args:
            identity: What a peer must share with this engine.
            connection: What vLLM's NIXL pull needs to reach this engine's blocks; fields of `messages.Found`.
            num_blocks: Blocks of the pool.
        """
        self._identity = identity
        self._connection = connection
        # Generations start anew with every engine start; the epoch tells readers which start they belong to.
        self._epoch = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._index = RetentionIndex(num_blocks)
        self._asked: Counter[str] = Counter()

    def retain(
        self, conversation: str, digests: Sequence[bytes], block_ids: Sequence[int], *, ttl_s: float
    ) -> None:
        """Record a finished turn."""
        with self._lock:
            self._index.retain(conversation, digests, block_ids, now_s=time.monotonic(), ttl_s=ttl_s)

    def release(self, conversation: str) -> None:
        """Forget a conversation that has ended."""
        with self._lock:
            self._index.release(conversation)

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
        if isinstance(message, messages.Lookup | messages.Validate) and message.v != messages.VERSION:
            return self._refuse(f"decode speaks version {messages.VERSION}, prefill {message.v}")
        if isinstance(message, messages.Lookup):
            return self._look_up(message)
        if isinstance(message, messages.Validate):
            return self._validate(message)
        self._count("malformed")
        return None

    def _look_up(self, message: messages.Lookup) -> bytes | None:
        wanted = messages.split_digests(message.digests)
        if wanted is None:
            self._count("malformed")
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
                **self._connection,
            )
        )

    def _validate(self, message: messages.Validate) -> bytes:
        self._count("validate")
        with self._lock:
            valid = message.epoch == self._epoch and self._index.valid(message.block_ids, message.generations)
        return messages.encode(messages.Verdict(messages.VERSION, valid))

    def _refuse(self, why: str) -> bytes:
        self._count("refused")
        return messages.encode(messages.Refused(messages.VERSION, why))

    def _count(self, kind: str) -> None:
        with self._lock:
            self._asked[kind] += 1
