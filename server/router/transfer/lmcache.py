"""LMCacheConnectorV1: both engines look KV up by its tokens in a store that they share.

Neither leg needs the other's answer. But LMCache's keys hold the tokens and no `cache_salt`: without a tag of their own, one
tenant could tell by time what another has sent. So both legs carry the scope's salt as a tag, which LMCache puts into
every key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bidikv_server.reasons import Reason
from bidikv_server.router.core.accounts import read_prefill_answer
from bidikv_server.router.core.ids import salt_of
from bidikv_server.router.core.outcomes import unaccounted
from bidikv_server.router.transfer.names import LMCACHE
from bidikv_server.router.transfer.system import Forward, Leg, LegOrder, Unprobed

if TYPE_CHECKING:
    from bidikv.headers import ReuseHeader
    from bidikv_server.router.core.accounts import PrefillAnswer
    from bidikv_server.router.transfer.system import Attempt

TAG: Final = "lmcache.tag.bidikv"


class LMCache(Unprobed):
    """Engines with LMCacheConnectorV1 and one backend."""

    name = LMCACHE
    order = LegOrder.IN_TURN

    async def begin(self, attempt: Attempt) -> LMCacheTransfer:
        """Begin an attempt; nothing to wait for."""
        return LMCacheTransfer(salt_of(attempt.request.scope))


@dataclass(frozen=True, slots=True)
class LMCacheTransfer(Forward):
    """One attempt.

    Attributes:
        salt: Separates scopes in the store.
    """

    salt: str

    @property
    def prefill(self) -> Leg:
        """Compute, and store under this scope."""
        return Leg({TAG: self.salt})

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """Nothing to hand on; the usage is read."""
        return replace(read_prefill_answer(raw), handle=None)

    def decode(self, prefilled: PrefillAnswer) -> Leg:  # noqa: ARG002  (decode looks for itself)
        """Load from this scope, whoever computed it."""
        return Leg({TAG: self.salt})

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """Prefill does not say where cached tokens came from."""
        return unaccounted(prefilled, decided, Reason.NO_ACCOUNT)
