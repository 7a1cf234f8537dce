"""What a transfer system is to the router: how KV gets from the engine that computed it to the one that needs it.

One adapter per system. A system lives as long as the router; for every attempt at a turn it begins one `Transfer`, which
says what each leg is asked and reads what each leg answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from bidikv_server.router.core.answers import conceal_transfer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv.headers import ReuseHeader
    from bidikv_server.reasons import Reason
    from bidikv_server.router.core.accounts import PrefillAnswer
    from bidikv_server.router.core.conversations import Match
    from bidikv_server.router.core.engines import Role
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.core.policy import Keep, RoutePlan
    from bidikv_server.router.core.requests import TurnRequest


class LegOrder(StrEnum):
    """When the decode leg is sent."""

    IN_TURN = "in_turn"
    """After prefill has answered."""
    AT_ONCE = "at_once"
    """Together with the prefill leg: decode needs nothing of prefill's answer, and waits for the KV by itself."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at one turn.

    Attributes:
        request: What the client asks for.
        match: Its place among the known turns.
        keep: What decode does with its blocks.
        barred: Why nothing may be read back for it.
        divisible: Two engines can serve it: its KV is one sequence's.
        plan: The engines.
        headers: What engines get with both legs.
        token_ids: Prefill's answer may say the prompt's token ids; decode takes them.
    """

    request: TurnRequest
    match: Match
    keep: Keep
    barred: Reason | None
    divisible: bool
    plan: RoutePlan
    headers: Mapping[str, str]
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Leg:
    """What one leg carries beside the client's own request.

    Attributes:
        params: `kv_transfer_params`; None sends none.
        headers: Over those of the attempt.
        fields: Body fields over the client's.
    """

    params: dict[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


class Transfer(Protocol):
    """One attempt's KV on its way. Used by one task, in the order of its methods."""

    @property
    def prefill(self) -> Leg:
        """The prefill leg. Not asked for when decode runs alone."""

    @property
    def pulls(self) -> bool:
        """The prefill leg tells a stock engine to fetch from decode; if that fails, it is asked again without."""

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """Read a prefill answer with status 200.

        Raises:
            ValueError: It is not what vLLM answers.
        """

    def decode(self, prefilled: PrefillAnswer) -> Leg:
        """The decode leg, after this prefill answer; `NOTHING_KNOWN` if decode runs alone."""

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """What became of the prompt.

        Args:
            prefilled: What prefill answered.
            decided: The outcome that placement decided, if it decided one.
        """

    def show(self, raw: bytes, *, drop: bool) -> bytes:
        """The whole (not streamed) answer of decode as the client gets it; called once, when it has ended well.

        Args:
            raw: The answer.
            drop: The API leaves a field out instead of writing null.
        """


class TransferSystem(Protocol):
    """One transfer system, or several in one `MultiConnector`.

    Attributes:
        name: As the setting `transfer` gives it.
        order: When the decode leg is sent.
    """

    name: str
    order: LegOrder

    async def begin(self, attempt: Attempt) -> Transfer:
        """Begin an attempt.

        Raises:
            UpstreamFault: The planned prefill engine cannot be used now.
        """

    async def probe(self, url: EngineUrl, role: Role) -> None:
        """Learn what legs need to know of an engine that has just answered a probe. Never raises for its silence."""

    def engine_down(self, url: EngineUrl) -> None:
        """Forget what was learnt of an engine: it may come back as another incarnation."""


class Show(Protocol):
    """`Transfer.show`."""

    def __call__(self, raw: bytes, *, drop: bool) -> bytes:
        """Make what the client gets of a whole answer."""


class Unprobed:
    """For systems whose legs need to know nothing of the engines."""

    async def probe(self, url: EngineUrl, role: Role) -> None:
        """Nothing to learn."""

    def engine_down(self, url: EngineUrl) -> None:
        """Nothing to forget."""


class Forward:
    """For transfers that never read back and take nothing from decode's answer."""

    @property
    def pulls(self) -> bool:
        """Prefill computes."""
        return False

    def show(self, raw: bytes, *, drop: bool) -> bytes:
        """The answer without what engines say to each other."""
        return conceal_transfer(raw, drop=drop)
