"""What may be done with a turn, found out before its first leg, and where each attempt at it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bidikv.headers import SESSION_HEADER
from bidikv_server.reasons import Reason
from bidikv_server.router.core.bodies import runs_alone
from bidikv_server.router.core.engines import EngineTable, Role
from bidikv_server.router.core.policy import NoHealthyEngine, Placement, Retention, RoutePlan
from bidikv_server.router.errors import NoEngineAvailable, ResponseUnreachable
from bidikv_server.router.legs import Tried
from bidikv_server.router.relay import LegFailed
from bidikv_server.router.turn import Turn

if TYPE_CHECKING:
    from bidikv_server.router.core.kept import Kept
    from bidikv_server.router.core.placer import Placer
    from bidikv_server.router.core.requests import TurnRequest
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.state.store import StateStore
    from bidikv_server.router.tokens import PromptTokens
    from bidikv_server.router.watch import TurnWatch


class Planner:
    """Of one router."""

    def __init__(
        self,
        settings: RouterSettings,
        engines: EngineTable,
        state: StateStore,
        placer: Placer,
        tokens: PromptTokens,
    ) -> None:
        self._readback = settings.readback
        self._retention = Retention(settings.default_ttl_s, settings.max_ttl_s)
        self._engines = engines
        self._state = state
        self._placer = placer
        self._tokens = tokens

    async def begin(self, request: TurnRequest, passed_on: dict[str, str], watch: TurnWatch) -> Turn:
        """Find a turn's place among the known ones, and what may be done with it.

        Args:
            request: What the client asks for.
            passed_on: Client headers that engines get as they are.
            watch: Sees what becomes of it.
        """
        match = await self._state.find(request.scope, request.session, request.chain)
        if request.kept is not None and request.session is None:
            match = replace(match, key=request.kept.conversation)
        barred, alone = self._barred(request), runs_alone(request)
        return Turn(
            request=request,
            match=match,
            engine_headers={**passed_on, SESSION_HEADER: match.key, "Content-Type": "application/json"},
            watch=watch,
            keep=self._retention.keep(request.turn, readback=barred is None),
            barred=barred,
            divisible=alone is None,
            tried=Tried(watch, alone),
            own_tokens=self._tokens.obstacle(request),
        )

    def plan(self, turn: Turn) -> RoutePlan:
        """The next attempt at a turn.

        Raises:
            LegFailed: No engine is left; this is what the last one failed with.
            NoEngineAvailable: There is none for the turn at all.
            ResponseUnreachable: The engine that keeps the response it goes on from is not to be had.
        """
        if turn.request.kept is not None:
            return self._plan_kept(turn, turn.request.kept)
        tried = turn.tried
        try:
            return self._placer.plan(
                turn.match,
                turn.request.chain,
                time.monotonic(),
                barred=turn.barred or tried.barred,
                alone=tried.alone,
                together=tried.together,
                excluded=tried.excluded,
            )
        except NoHealthyEngine as error:
            if tried.failure is not None:
                raise tried.failure from error
            raise NoEngineAvailable(error.role) from error

    def is_exhausted(self, turn: Turn) -> bool:
        """Whether no engine is left for another attempt."""
        try:
            self.plan(turn)
        except (LegFailed, NoEngineAvailable, ResponseUnreachable):
            return True
        return False

    def _plan_kept(self, turn: Turn, kept: Kept) -> RoutePlan:
        """Run where the earlier response is, also on an engine that is being emptied: nobody else has it."""
        for engine in self._engines.snapshots(Role.DECODE):
            if engine.url == kept.engine and engine.healthy and turn.tried.excluded.takes(engine):
                return RoutePlan(engine, None, (), turn.tried.alone, Placement.KEPT_RESPONSE)
        raise turn.tried.failure or ResponseUnreachable

    def _barred(self, request: TurnRequest) -> Reason | None:
        """Why nothing of this turn may be reused."""
        if not (self._readback and request.readback):
            return Reason.READBACK_OFF
        return Reason.UNSUPPORTED if request.media.named else None
