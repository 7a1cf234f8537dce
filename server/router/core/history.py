"""What became of the last turns of each conversation, and whose it is: the memory behind the admin API.

A turn's record is packed, so that a conversation costs the same few hundred bytes whatever its turns were like. Unlike
the conversation table this decides nothing: to lose it loses explanations only.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from bidikv_server.reasons import Reason
from bidikv_server.router.core.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Iterator, Reversible

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.core.digests import Digest
    from bidikv_server.router.core.ids import ConversationKey, EngineUrl, Scope
    from bidikv_server.router.core.policy import RoutePlan

_PACKED: Final = struct.Struct("<16s5iBBHHfd")
_REASONS: Final = tuple(Reason)
_PLACEMENTS: Final = tuple(Placement)
_UNKNOWN: Final = 0xFFFF


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What became of one turn.

    Attributes:
        turn: Digest of its prompt, as in the conversation's tree; empty if it has none.
        reason: Of its reuse.
        placement: Why it was decoded there.
        prompt_tokens: The whole prompt; None, here and below, is not known.
        remote_tokens: Pulled from decode.
        local_tokens: Found in prefill's own cache.
        computed_tokens: Computed by prefill.
        diverged_at_token: First prompt token that is not what decode held.
        prefill: Engine that computed the prompt; None when decode did it alone.
        decode: Engine that answered; None if it is not remembered.
        ttft_s: From the whole request to the first byte of the answer's body.
        at_s: When it ended well, on the caller's monotonic clock.
    """

    turn: bytes
    reason: Reason
    placement: Placement
    prompt_tokens: int | None
    remote_tokens: int | None
    local_tokens: int | None
    computed_tokens: int | None
    diverged_at_token: int | None
    prefill: EngineUrl | None
    decode: EngineUrl | None
    ttft_s: float
    at_s: float

    @classmethod
    def of(
        cls, digest: Digest | None, plan: RoutePlan, reuse: ReuseHeader, *, ttft_s: float, at_s: float
    ) -> TurnRecord:
        """What became of a turn that went by this plan and told this of its reuse."""
        return cls(
            turn=digest or b"",
            reason=Reason(reuse.reason),
            placement=plan.placement,
            prompt_tokens=reuse.prompt_tokens,
            remote_tokens=reuse.remote_tokens,
            local_tokens=reuse.local_tokens,
            computed_tokens=reuse.computed_tokens,
            diverged_at_token=reuse.diverged_at_token,
            prefill=plan.prefill.url if plan.prefill is not None else None,
            decode=plan.decode.url,
            ttft_s=ttft_s,
            at_s=at_s,
        )


@dataclass(frozen=True, slots=True)
class Known:
    """One conversation of the memory.

    Attributes:
        key: Its key.
        tenant: Whose it is.
        model: As the client of its first turn named it.
        records: Its last turns, oldest first, never empty; in a list only the very last one.
        stamp: Its place in the order of use; greater is later.
    """

    key: ConversationKey
    tenant: str
    model: str
    records: tuple[TurnRecord, ...]
    stamp: int


@dataclass(slots=True)
class _Entry:
    tenant: str
    model: str
    packed: bytes
    stamp: int


class History:
    """Bounded memory of conversations: least recently used first out, idle ones expire.

    Times are seconds on one monotonic clock of the caller. A tenant's conversations have an order of their own: what
    it lists, and how long that takes, has nothing to do with anybody else's.
    """

    def __init__(self, *, max_conversations: int, max_records: int, idle_s: float) -> None:
        self._max_conversations = max_conversations
        self._max_bytes = max_records * _PACKED.size
        self._idle_us = int(idle_s * 1e6)
        self._entries: OrderedDict[ConversationKey, _Entry] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[ConversationKey, None]] = {}
        self._engines: dict[EngineUrl | None, int] = {None: _UNKNOWN}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, key: ConversationKey, scope: Scope, record: TurnRecord) -> None:
        """Remember a turn that ended at `record.at_s`."""
        self.expire(record.at_s)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(scope.tenant, scope.model, b"", 0)
        # Two turns within a microsecond keep their order.
        self._stamp = entry.stamp = max(_microseconds(record.at_s), self._stamp + 1)
        entry.packed = (entry.packed + self._pack(record))[-self._max_bytes :]
        self._entries.move_to_end(key)
        keys = self._of_tenant.setdefault(entry.tenant, OrderedDict())
        keys[key] = None
        keys.move_to_end(key)
        while len(self._entries) > self._max_conversations:
            self.forget(next(iter(self._entries)))

    def find(self, key: ConversationKey, now_s: float, *, tenant: str | None = None) -> Known | None:
        """One conversation; None if it is not known, or is not that tenant's. Without a tenant it may be anybody's."""
        self.expire(now_s)
        entry = self._entries.get(key)
        if entry is None or tenant not in {None, entry.tenant}:
            return None
        return self._known(key, entry, entry.packed)

    def page(
        self, now_s: float, *, limit: int, tenant: str | None = None, before: int | None = None
    ) -> tuple[tuple[Known, ...], bool]:
        """Conversations, the one used last first.

        Args:
            now_s: Now.
            limit: At most so many.
            tenant: Of this tenant only; None of all.
            before: Only those whose stamp is below.

        Returns:
            The page, and whether there is more after it.
        """
        self.expire(now_s)
        keys: Reversible[ConversationKey] = (
            self._entries if tenant is None else self._of_tenant.get(tenant, ())
        )
        older = (
            (key, entry)
            for key, entry in ((key, self._entries[key]) for key in reversed(keys))
            if before is None or entry.stamp < before
        )
        found = list(islice(older, limit + 1))
        listed = tuple(self._known(key, entry, entry.packed[-_PACKED.size :]) for key, entry in found[:limit])
        return listed, len(found) > limit

    def forget(self, key: ConversationKey) -> None:
        """Forget a conversation, if it is known."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        keys = self._of_tenant[entry.tenant]
        del keys[key]
        if not keys:
            del self._of_tenant[entry.tenant]

    def expire(self, now_s: float) -> None:
        """Forget idle conversations."""
        limit = _microseconds(now_s) - self._idle_us
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.stamp > limit:
                return
            self.forget(key)

    def check_integrity(self) -> None:
        """Recompute every bound and order.

        Raises:
            AssertionError: Two views of the memory disagree.
        """
        assert len(self) <= self._max_conversations, "too many conversations"  # noqa: S101
        stamps = [entry.stamp for entry in self._entries.values()]
        assert stamps == sorted(set(stamps)), "conversations are not in order of use"  # noqa: S101
        owned = {key: tenant for tenant, keys in self._of_tenant.items() for key in keys}
        assert owned == {key: entry.tenant for key, entry in self._entries.items()}, "tenants disagree"  # noqa: S101
        assert all(self._of_tenant.values()), "a tenant without conversations"  # noqa: S101
        for keys in self._of_tenant.values():
            order = [self._entries[key].stamp for key in keys]
            assert order == sorted(order), "a tenant's conversations are not in order of use"  # noqa: S101
        assert all(0 < len(e.packed) <= self._max_bytes for e in self._entries.values()), "records"  # noqa: S101

    def _known(self, key: ConversationKey, entry: _Entry, packed: bytes) -> Known:
        return Known(key, entry.tenant, entry.model, tuple(self._unpack(packed)), entry.stamp)

    def _pack(self, record: TurnRecord) -> bytes:
        return _PACKED.pack(
            record.turn,
            *(-1 if count is None else min(count, 2**31 - 1) for count in _counts(record)),
            _REASONS.index(record.reason),
            _PLACEMENTS.index(record.placement),
            self._number(record.prefill),
            self._number(record.decode),
            record.ttft_s,
            record.at_s,
        )

    def _unpack(self, packed: bytes) -> Iterator[TurnRecord]:
        engines = {number: url for url, number in self._engines.items()}
        for turn, *counts, reason, placement, prefill, decode, ttft_s, at_s in _PACKED.iter_unpack(packed):
            prompt, remote, local, computed, diverged = (None if count < 0 else count for count in counts)
            yield TurnRecord(
                turn=turn if any(turn) else b"",
                reason=_REASONS[reason],
                placement=_PLACEMENTS[placement],
                prompt_tokens=prompt,
                remote_tokens=remote,
                local_tokens=local,
                computed_tokens=computed,
                diverged_at_token=diverged,
                prefill=engines[prefill],
                decode=engines[decode],
                ttft_s=ttft_s,
                at_s=at_s,
            )

    def _number(self, engine: EngineUrl | None) -> int:
        """Number of an engine's URL; those after the first 65,535 ever seen are not told apart."""
        if engine not in self._engines and len(self._engines) > _UNKNOWN:
            return _UNKNOWN
        return self._engines.setdefault(engine, len(self._engines) - 1)


def _counts(record: TurnRecord) -> tuple[int | None, ...]:
    return (
        record.prompt_tokens,
        record.remote_tokens,
        record.local_tokens,
        record.computed_tokens,
        record.diverged_at_token,
    )


def _microseconds(at_s: float) -> int:
    return int(at_s * 1e6)
