"""Several systems in one vLLM `MultiConnector`: it passes a request's parameters to all its children."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bidikv_server.router.transfer.names import BIDIKV
from bidikv_server.router.transfer.system import Leg

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bidikv.headers import ReuseHeader
    from bidikv_server.reasons import Reason
    from bidikv_server.router.core.accounts import PrefillAnswer
    from bidikv_server.router.core.engines import Role
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.transfer.system import Attempt, Transfer, TransferSystem


class Combined:
    """The first system brings the prompt to decode and reads the answers; the others add what their children need."""

    def __init__(self, systems: Sequence[TransferSystem]) -> None:
        self._systems = tuple(systems)
        # Stock movers can only tell of prefill's own cache, which a store's loads would be counted to.
        self._teller = 0 if systems[0].name == BIDIKV else len(self._systems) - 1
        self.name = "+".join(system.name for system in systems)
        self.order = systems[0].order

    async def begin(self, attempt: Attempt) -> CombinedTransfer:
        """Begin an attempt in every system."""
        begun = [await system.begin(attempt) for system in self._systems]
        return CombinedTransfer(begun[0], tuple(begun[1:]), begun[self._teller])

    async def probe(self, url: EngineUrl, role: Role) -> None:
        """Let every system learn."""
        for system in self._systems:
            await system.probe(url, role)

    def engine_down(self, url: EngineUrl) -> None:
        """Let every system forget."""
        for system in self._systems:
            system.engine_down(url)


@dataclass(frozen=True, slots=True)
class CombinedTransfer:
    """One attempt.

    Attributes:
        first: The transfer that reads answers.
        others: Those that only add to the legs.
        teller: The one whose account counts.
    """

    first: Transfer
    others: tuple[Transfer, ...]
    teller: Transfer

    @property
    def prefill(self) -> Leg:
        """Every child's part."""
        return _joined([self.first.prefill, *(other.prefill for other in self.others)])

    @property
    def pulls(self) -> bool:
        """As the first does."""
        return self.first.pulls

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """As the first reads it: the children's answers come merged."""
        return self.first.read_prefill(raw)

    def decode(self, prefilled: PrefillAnswer) -> Leg:
        """Every child's part."""
        return _joined([self.first.decode(prefilled), *(other.decode(prefilled) for other in self.others)])

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """As the teller tells it."""
        return self.teller.account(prefilled, decided)

    def show(self, raw: bytes, *, drop: bool) -> bytes:
        """As the first shows it."""
        return self.first.show(raw, drop=drop)


def _joined(legs: Iterable[Leg]) -> Leg:
    params: dict[str, Any] = {}
    headers: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for leg in legs:
        params |= leg.params or {}
        headers |= leg.headers
        fields |= leg.fields
    return Leg(params or None, headers, fields)
