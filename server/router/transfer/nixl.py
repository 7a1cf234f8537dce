"""Stock vLLM's NixlConnector (decode pulls) and NixlPushConnector (prefill pushes), from prefill to decode only."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bidikv_server import wire
from bidikv_server.router.core.accounts import read_prefill_answer
from bidikv_server.router.core.outcomes import cached_only
from bidikv_server.router.transfer.names import NIXL, NIXL_PUSH
from bidikv_server.router.transfer.system import Forward, Leg, LegOrder, Unprobed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv.headers import ReuseHeader
    from bidikv_server.reasons import Reason
    from bidikv_server.router.core.accounts import PrefillAnswer
    from bidikv_server.router.transfer.system import Attempt

_REQUEST_ID: Final = "X-Request-Id"
_PUSHED_WITHOUT: Final = frozenset({"remote_block_ids", "remote_num_tokens"})
"""Decode must not learn prefill's blocks: it registers its own, and prefill writes into them."""


class NixlPull(Unprobed):
    """Decode pulls the prompt under the handle that prefill answers with."""

    name = NIXL
    order = LegOrder.IN_TURN

    async def begin(self, attempt: Attempt) -> PullTransfer:  # noqa: ARG002  (every pull is asked for alike)
        """Begin an attempt; nothing to wait for."""
        return PullTransfer()


@dataclass(frozen=True, slots=True)
class PullTransfer(Forward):
    """One attempt."""

    @property
    def prefill(self) -> Leg:
        """Compute for decode, nothing to fetch."""
        return Leg(dict(wire.NOTHING_TO_PULL))

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """The handle for decode."""
        return read_prefill_answer(raw)

    def decode(self, prefilled: PrefillAnswer) -> Leg:
        """The handle as it came; nothing without one."""
        return Leg(prefilled.handle)

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """Only prefill's own prefix cache can have helped."""
        return cached_only(prefilled, decided)


class NixlPush(Unprobed):
    """Prefill pushes the prompt into the blocks that decode registers with it.

    Prefill pairs the two legs by their request id alone, and a client may choose that: two requests of one id would get
    each other's KV. So every attempt has an id of its own.
    """

    name = NIXL_PUSH
    order = LegOrder.IN_TURN

    async def begin(self, attempt: Attempt) -> PushTransfer:
        """Begin an attempt; nothing to wait for."""
        given = attempt.headers.get(_REQUEST_ID, "push")
        return PushTransfer({_REQUEST_ID: f"{given[:80]}-{uuid.uuid4().hex}"})


@dataclass(frozen=True, slots=True)
class PushTransfer(Forward):
    """One attempt.

    Attributes:
        headers: The id that pairs its legs.
    """

    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefill(self) -> Leg:
        """Compute for decode, nothing to fetch."""
        return Leg(dict(wire.NOTHING_TO_PULL), headers=self.headers)

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """Where prefill is."""
        return read_prefill_answer(raw)

    def decode(self, prefilled: PrefillAnswer) -> Leg:
        """Where prefill is, without its blocks; nothing without an answer."""
        handle = prefilled.handle
        if handle is None:
            return Leg(headers=self.headers)
        named = {name: value for name, value in handle.items() if name not in _PUSHED_WITHOUT}
        return Leg(named, headers=self.headers)

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """Only prefill's own prefix cache can have helped."""
        return cached_only(prefilled, decided)
