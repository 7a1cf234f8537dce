"""bidikv's own connector: prefill proves what decode retains token by token and reads it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server import wire
from bidikv_server.router.core.accounts import read_prefill_answer, with_reason
from bidikv_server.router.core.bodies import decode_params, returns_token_ids
from bidikv_server.router.core.ids import salt_of
from bidikv_server.router.transfer.names import BIDIKV
from bidikv_server.router.transfer.system import Forward, Leg, LegOrder, Unprobed

if TYPE_CHECKING:
    from bidikv.headers import ReuseHeader
    from bidikv_server.reasons import Reason
    from bidikv_server.router.core.accounts import PrefillAnswer
    from bidikv_server.router.transfer.system import Attempt


class Readback(Unprobed):
    """The system behind `bidikv engine`. Where the indexes are, the engine table knows from the probes."""

    name = BIDIKV
    order = LegOrder.IN_TURN

    async def begin(self, attempt: Attempt) -> ReadbackTransfer:
        """Begin an attempt; nothing to wait for."""
        return ReadbackTransfer(attempt)


@dataclass(frozen=True, slots=True)
class ReadbackTransfer(Forward):
    """One attempt. Prefill's connector verifies and recovers by itself, so the router never asks twice."""

    attempt: Attempt

    @property
    def prefill(self) -> Leg:
        """The indexes to ask."""
        return Leg(
            wire.prefill_leg(
                conversation=self.attempt.match.key,
                salt=salt_of(self.attempt.request.scope),
                sources=list(self.attempt.plan.sources),
                return_token_ids=self.attempt.token_ids and not returns_token_ids(self.attempt.request.path),
            )
        )

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """The handle for decode and prefill's own account."""
        return read_prefill_answer(raw)

    def decode(self, prefilled: PrefillAnswer) -> Leg:
        """The handle, and what to retain; without a handle only to an engine of ours, which retains what it computes."""
        alone = self.attempt.divisible and self.attempt.plan.prefill is None
        return Leg(
            decode_params(
                prefilled.handle,
                conversation=self.attempt.match.key,
                salt=salt_of(self.attempt.request.scope),
                keep=self.attempt.keep,
                retains_alone=alone and bool(self.attempt.plan.decode.indexes),
            )
        )

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """Prefill's account, unless placement decided the outcome."""
        return with_reason(prefilled.reuse, decided)
