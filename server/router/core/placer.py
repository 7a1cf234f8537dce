"""Plans every attempt at a turn, and learns from what became of it.

Pure: times come in as seconds on one monotonic clock of the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.forecast import Known
from bidikv_server.router.core.leg_costs import LegCosts
from bidikv_server.router.core.policy import plan_route
from bidikv_server.router.core.prefixes import PrefixMemory

if TYPE_CHECKING:
    from bidikv.headers import ReuseHeader
    from bidikv_server.reasons import Reason
    from bidikv_server.router.core.conversations import Match
    from bidikv_server.router.core.digests import Chain
    from bidikv_server.router.core.engines import EngineTable
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.core.policy import Excluded, Policies, RoutePlan


class Placer:
    """Of one router.

    Attributes:
        prefixes: Which prefill engine computed which prompts.
        costs: What legs take.
    """

    def __init__(
        self, engines: EngineTable, policies: Policies, *, max_prefixes: int, prefill_required: bool
    ) -> None:
        self._engines = engines
        self._policies = policies
        self._prefill_required = prefill_required
        self.prefixes = PrefixMemory(max_prefixes=max_prefixes)
        self.costs = LegCosts()

    def plan(
        self,
        match: Match,
        chain: Chain,
        now_s: float,
        *,
        barred: Reason | None = None,
        alone: Reason | None = None,
        together: bool = False,
        excluded: Excluded | None = None,
    ) -> RoutePlan:
        """The next attempt at a turn; arguments as of `plan_route`.

        Raises:
            NoHealthyEngine: Nothing can serve the turn.
        """
        self._engines.advance(now_s)
        turn_steps = match.ancestor.depth if match.ancestor is not None else 0
        return plan_route(
            match,
            [*self._engines.snapshots(Role.PREFILL), *self._engines.snapshots(Role.DECODE)],
            barred=barred,
            alone=alone,
            together=together,
            prefill_required=self._prefill_required,
            excluded=excluded,
            policies=self._policies,
            known=Known(self.costs, now_s, self.prefixes.foresee(chain, now_s, turn_steps=turn_steps)),
        )

    def prefilled(
        self, plan: RoutePlan, chain: Chain, reuse: ReuseHeader, *, ahead: int, seconds: float, now_s: float
    ) -> None:
        """Learn from a prefill leg that ended well.

        Args:
            plan: Of its attempt.
            chain: Of its prompt.
            reuse: Prefill's account; what it does not tell is not learnt.
            ahead: Tokens that were to be computed there before its own.
            seconds: From sending it to its answer.
            now_s: Now.
        """
        if plan.prefill is None:
            return
        engine = plan.prefill.url
        if reuse.local_tokens is not None and plan.cached_tokens:
            self.prefixes.found(engine, plan.cached_tokens, reuse.local_tokens)
        if reuse.prompt_tokens is not None:
            self.prefixes.note(chain, engine, reuse.prompt_tokens, now_s)
        if reuse.computed_tokens is not None and reuse.remote_tokens is not None:
            self.costs.prefilled(
                engine,
                ahead=ahead,
                computed=reuse.computed_tokens,
                pulled=reuse.remote_tokens,
                asked=bool(plan.sources),
                seconds=seconds,
                now_s=now_s,
            )

    def streamed(self, plan: RoutePlan, *, seconds: float, now_s: float) -> None:
        """Learn from a streamed decode leg that gave its first byte `seconds` after it was sent."""
        if plan.decode_tokens is None:
            return
        learn = self.costs.ran_alone if plan.prefill is None else self.costs.handed_over
        learn(plan.decode.url, tokens=plan.decode_tokens, seconds=seconds, now_s=now_s)

    def ended(self, plan: RoutePlan, chain: Chain, reuse: ReuseHeader, now_s: float) -> None:
        """Learn from a turn that ended well.

        Args:
            plan: Of its attempt.
            chain: Of its prompt.
            reuse: Its account. A prompt that decode computed alone stays as long as foreseen if that tells nothing.
            now_s: Now.
        """
        if plan.prefill is None and plan.prompt_tokens is not None:
            counted = reuse.prompt_tokens
            tokens = plan.prompt_tokens if counted is None else counted
            self.prefixes.note(chain, None, tokens, now_s, counted=counted is not None)
        self.prefixes.ended(chain, now_s)

    def came_up(self, engine: EngineUrl, now_s: float) -> None:
        """Forget an engine's cache and speed: what answers there now may be another one."""
        self.prefixes.forget(engine, now_s)
        self.costs.forget(engine)
