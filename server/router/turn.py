"""One turn under way: what is asked, where it stands, and what has been tried so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.router.transfer.system import Attempt

if TYPE_CHECKING:
    from bidikv_server.reasons import Reason
    from bidikv_server.router.core.conversations import Match
    from bidikv_server.router.core.policy import Keep, RoutePlan
    from bidikv_server.router.core.prompt_tokens import Tokenised
    from bidikv_server.router.core.requests import TurnRequest
    from bidikv_server.router.legs import Tried
    from bidikv_server.router.watch import TurnWatch


@dataclass(slots=True)
class Turn:
    """One turn under way.

    Attributes:
        request: What the client asks for.
        match: Its place among the known turns.
        engine_headers: Headers for both legs.
        watch: Sees what becomes of it.
        keep: What decode does with its blocks.
        barred: Why nothing may be read back for it.
        divisible: Two engines can serve it: its KV is one sequence's.
        tried: What it has tried so far.
        own_tokens: Why decode finds the prompt's tokens itself; None lets it take prefill's.
        ttft_s: From the whole request to the first byte of the answer's body.
    """

    request: TurnRequest
    match: Match
    engine_headers: dict[str, str]
    watch: TurnWatch
    keep: Keep
    barred: Reason | None
    divisible: bool
    tried: Tried
    own_tokens: Tokenised | None
    ttft_s: float = 0.0

    def attempt(self, plan: RoutePlan, *, token_ids: bool) -> Attempt:
        """One attempt at it, for the transfer system.

        Args:
            plan: The engines.
            token_ids: Decode takes the prompt's tokens from prefill's answer.
        """
        return Attempt(
            request=self.request,
            match=self.match,
            keep=self.keep,
            barred=self.barred or self.tried.barred,
            divisible=self.divisible,
            plan=plan,
            headers=self.engine_headers,
            token_ids=token_ids,
        )
