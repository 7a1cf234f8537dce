"""What became of the last turns of each conversation, and whose it is: the memory behind the admin API.

A turn's record is packed, so that a conversation costs the same few hundred bytes whatever its turns were like. Unlike
the conversation table this decides nothing: to lose it loses explanations only.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from bidikv_server.reasons import Reason
from bidikv_server.router.core.choices import Mode, ModeReason, Placement, PrefillChoice
from bidikv_server.router.core.keyed_order import KeyedOrder
from bidikv_server.router.core.numbers import Numbers
from bidikv_server.router.core.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.core.digests import Digest
    from bidikv_server.router.core.ids import ConversationKey, EngineUrl, Scope
    from bidikv_server.router.core.policy import RoutePlan

_PACKED: Final = struct.Struct("<16s5iBBBBBHHfd")
_REASONS: Final = tuple(Reason)
_PLACEMENTS: Final = tuple(Placement)
_PREFILL_CHOICES: Final = tuple(PrefillChoice)
_MODES: Final = tuple(Mode)
_MODE_REASONS: Final = tuple(ModeReason)
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
        prefill_choice: Why the prompt was computed there.
        mode: How it got its prompt's KV.
        mode_reason: Why in that way.
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
    prefill_choice: PrefillChoice = PrefillChoice.NONE
    mode: Mode = Mode.ALONE
    mode_reason: ModeReason = ModeReason.ONLY_WAY

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
            prefill_choice=plan.prefill_choice,
            mode=plan.mode,
            mode_reason=plan.mode_reason,
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


class History:
    """Bounded memory of conversations: least recently used first out, idle ones expire.

    Times are seconds on one monotonic clock of the caller. A tenant's conversations have an order of their own: what
    it lists, and how long that takes, has nothing to do with anybody else's.
    """

    def __init__(self, *, max_conversations: int, max_records: int, idle_s: float) -> None:
        self._max_conversations = max_conversations
        self._max_bytes = max_records * _PACKED.size
        self._idle_us = int(idle_s * 1e6)
        self._order = KeyedOrder()
        self._packed = [b""]
        self._stamps = array("Q", [0])
        self._scopes = array("I", [0])
        self._names: Numbers[tuple[str, str]] = Numbers()
        self._of_tenant = Rings()
        self._newest: dict[str, int] = {}
        self._engines: dict[EngineUrl | None, int] = {None: _UNKNOWN}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._order)

    def record(self, key: ConversationKey, scope: Scope, record: TurnRecord) -> None:
        """Remember a turn that ended at `record.at_s`."""
        self.expire(record.at_s)
        number = self._order.get(key)
        if number:
            self._leave_tenant(number)
        else:
            number = self._add(key, scope)
        # Two turns within a microsecond keep their order.
        self._stamp = self._stamps[number] = max(_microseconds(record.at_s), self._stamp + 1)
        self._packed[number] = (self._packed[number] + self._pack(record))[-self._max_bytes :]
        self._order.use(number)
        tenant, _ = self._names[self._scopes[number]]
        self._newest[tenant] = self._of_tenant.append(self._newest.get(tenant, 0), number)
        while len(self._order) > self._max_conversations:
            self._forget(self._order.oldest)

    def find(self, key: ConversationKey, now_s: float, *, tenant: str | None = None) -> Known | None:
        """One conversation; None if it is not known, or is not that tenant's. Without a tenant it may be anybody's."""
        self.expire(now_s)
        number = self._order.get(key)
        owner = self._names[self._scopes[number]] if number else None
        if owner is None or tenant not in {None, owner[0]}:
            return None
        return self._known(number, self._packed[number])

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
        numbers = (
            self._order.backward()
            if tenant is None
            else self._of_tenant.backward(self._newest.get(tenant, 0))
        )
        older = (number for number in numbers if before is None or self._stamps[number] < before)
        found = list(islice(older, limit + 1))
        listed = tuple(self._known(number, self._packed[number][-_PACKED.size :]) for number in found[:limit])
        return listed, len(found) > limit

    def forget(self, key: ConversationKey) -> None:
        """Forget a conversation, if it is known."""
        if number := self._order.get(key):
            self._forget(number)

    def expire(self, now_s: float) -> None:
        """Forget idle conversations."""
        limit = _microseconds(now_s) - self._idle_us
        while (number := self._order.oldest) and self._stamps[number] <= limit:
            self._forget(number)

    def check_integrity(self) -> None:
        """Recompute every bound and order.

        Raises:
            AssertionError: Two views of the history disagree.
        """
        self._order.check_integrity()
        numbers = list(self._order.forward())
        assert len(numbers) <= self._max_conversations, "too many conversations"  # noqa: S101
        assert _ascend(self._stamps[number] for number in numbers), "not in order of use"  # noqa: S101
        scopes = {number: self._names[self._scopes[number]] for number in numbers}
        assert self._names.uses() == Counter(scopes.values()), "scopes are miscounted"  # noqa: S101
        owned = {tenant: list(self._of_tenant.forward(newest)) for tenant, newest in self._newest.items()}
        assert all(owned.values()), "a tenant without conversations"  # noqa: S101
        tenants = sorted((number, tenant) for tenant, of_tenant in owned.items() for number in of_tenant)
        assert tenants == sorted((n, tenant) for n, (tenant, _) in scopes.items()), "tenants"  # noqa: S101
        for of_tenant in owned.values():
            assert _ascend(self._stamps[number] for number in of_tenant), "a tenant's order of use"  # noqa: S101
        assert all(0 < len(self._packed[number]) <= self._max_bytes for number in numbers), "records"  # noqa: S101

    def _add(self, key: ConversationKey, scope: Scope) -> int:
        number, grown = self._order.add(key)
        if grown:
            self._packed.append(b"")
            self._stamps.append(0)
            self._scopes.append(0)
            self._of_tenant.grow()
        self._scopes[number] = self._names.take((scope.tenant, scope.model))
        return number

    def _forget(self, number: int) -> None:
        self._leave_tenant(number)
        self._names.give_back(self._scopes[number])
        self._packed[number] = b""
        self._order.remove(number)

    def _leave_tenant(self, number: int) -> None:
        tenant, _ = self._names[self._scopes[number]]
        newest = self._of_tenant.remove(self._newest[tenant], number)
        if newest:
            self._newest[tenant] = newest
        else:
            del self._newest[tenant]

    def _known(self, number: int, packed: bytes) -> Known:
        tenant, model = self._names[self._scopes[number]]
        records = tuple(self._unpack(packed))
        return Known(self._order.key(number), tenant, model, records, self._stamps[number])

    def _pack(self, record: TurnRecord) -> bytes:
        return _PACKED.pack(
            record.turn,
            *(-1 if count is None else min(count, 2**31 - 1) for count in _counts(record)),
            _REASONS.index(record.reason),
            _PLACEMENTS.index(record.placement),
            _PREFILL_CHOICES.index(record.prefill_choice),
            _MODES.index(record.mode),
            _MODE_REASONS.index(record.mode_reason),
            self._number(record.prefill),
            self._number(record.decode),
            record.ttft_s,
            record.at_s,
        )

    def _unpack(self, packed: bytes) -> Iterator[TurnRecord]:
        engines = {number: url for url, number in self._engines.items()}
        for (
            turn,
            *counts,
            reason,
            placement,
            choice,
            mode,
            why,
            prefill,
            decode,
            ttft_s,
            at_s,
        ) in _PACKED.iter_unpack(packed):
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
                prefill_choice=_PREFILL_CHOICES[choice],
                mode=_MODES[mode],
                mode_reason=_MODE_REASONS[why],
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


def _ascend(stamps: Iterator[int]) -> bool:
    values = list(stamps)
    return values == sorted(values)


def _microseconds(at_s: float) -> int:
    return int(at_s * 1e6)
