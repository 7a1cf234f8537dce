"""A turn from plan to last byte: prefill leg, decode leg, and what to do when one of them fails.

Until the client has seen a byte, a failed leg is tried elsewhere; after that, a failure ends the stream with an error
event. Only a turn that ended cleanly takes its place in the conversation table.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, ParamSpec

from bidikv.headers import KEY_HEADER, REUSE_HEADER
from bidikv_server.reasons import Reason
from bidikv_server.router.core import prompt_tokens
from bidikv_server.router.core.accounts import NOTHING_KNOWN, PrefillAnswer
from bidikv_server.router.core.bodies import prefill_body
from bidikv_server.router.core.conversations import Holder
from bidikv_server.router.core.engines import EngineTable, Role
from bidikv_server.router.core.history import TurnRecord
from bidikv_server.router.core.json_bytes import encode_from
from bidikv_server.router.core.kept import Kept
from bidikv_server.router.core.paths import MESSAGES_PATH
from bidikv_server.router.core.prompt_tokens import Tokenised
from bidikv_server.router.errors import EngineRefusesRouter, UpstreamFault
from bidikv_server.router.legs import Legs
from bidikv_server.router.planning import Planner
from bidikv_server.router.relay import LegFailed, RefusedByEngine, check_answer, relay
from bidikv_server.router.responses import began_of
from bidikv_server.router.retries import Retries, RetryBudget
from bidikv_server.router.tokens import PromptTokens
from bidikv_server.router.transfer.legs import run_legs
from bidikv_server.router.transfer.system import LegOrder
from bidikv_server.router.upstream import EngineClient, StreamWaits

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.access import Access
    from bidikv_server.router.core.placer import Placer
    from bidikv_server.router.core.policy import RoutePlan
    from bidikv_server.router.core.requests import TurnRequest
    from bidikv_server.router.metrics import RouterMetrics
    from bidikv_server.router.replies import Reply
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.state.store import StateStore
    from bidikv_server.router.transfer.system import Transfer, TransferSystem
    from bidikv_server.router.turn import Turn
    from bidikv_server.router.watch import TurnWatch

_log = logging.getLogger(__name__)
P = ParamSpec("P")
_SESSION = KEY_HEADER.encode()


class TurnService:
    """Serves turns."""

    def __init__(
        self,
        settings: RouterSettings,
        engines: EngineTable,
        state: StateStore,
        client: EngineClient,
        metrics: RouterMetrics,
        *,
        access: Access,
        placer: Placer,
        transfer: TransferSystem,
    ) -> None:
        self._settings = settings
        self._transfer = transfer
        self._legs = Legs(
            engines,
            metrics,
            may_run_alone=settings.prefill_fallback,
            engine_down=transfer.engine_down,
        )
        self._placer = placer
        self._budget = RetryBudget(settings.max_attempts, settings.retry_budget_s, settings.refused_wait_s)
        self._state = state
        self._client = client
        self._metrics = metrics
        self._access = access
        self._tokens = PromptTokens(settings, metrics)
        self._planner = Planner(settings, engines, state, placer, self._tokens)

    async def serve(
        self,
        request: TurnRequest,
        passed_on: dict[str, str],
        reply: Reply,
        watch: TurnWatch,
    ) -> None:
        """Answer one request.

        Args:
            request: What the client asks for.
            passed_on: Client headers that engines get as they are.
            reply: Where the answer goes.
            watch: Sees what becomes of it.

        Raises:
            RouterFault: The turn could not be served and nothing was sent.
        """
        turn = await self._planner.begin(request, passed_on, watch)
        watch.asked(request, turn.match.key)
        self._metrics.identities.labels(request.identity.source).inc()
        reply.extra[_SESSION] = turn.match.key.encode()
        try:
            await Retries(self._budget, turn.tried, lambda: self._planner.is_exhausted(turn)).run(
                lambda: self._attempt(turn, reply)
            )
        except RefusedByEngine as refused:
            self._check_credential(turn, refused.answer.status)
            self._count_failure(turn, "refused_by_engine")
            await reply.whole(refused.answer.status, refused.answer.headers, refused.answer.body)
        except LegFailed as failed:
            self._count_failure(turn, failed.fault.code)
            if failed.answer is None:
                raise failed.fault from failed
            await reply.whole(failed.answer.status, failed.answer.headers, failed.answer.body)

    def _check_credential(self, turn: Turn, status: int) -> None:
        """Keep an engine's verdict on the router's credential from a client, who would take it for its own.

        Raises:
            EngineRefusesRouter: The answer is such a verdict.
        """
        if self._access.refused_by_engine(status):
            self._count_failure(turn, EngineRefusesRouter.code)
            _log.error(
                "an engine refuses the router's credential with status %d: check upstream_api_key", status
            )
            raise EngineRefusesRouter

    async def _attempt(self, turn: Turn, reply: Reply) -> None:
        """Run both legs once; every failure leaves one engine or one option less for the next attempt."""
        while True:
            plan = self._planner.plan(turn)
            try:
                transfer = await self._begin_transfer(turn, plan)
                await run_legs(
                    self._transfer.order if plan.prefill is not None else LegOrder.IN_TURN,
                    partial(self._prefill, turn, plan, transfer),
                    partial(self._decode, turn, plan, transfer, reply),
                )
            except RefusedByEngine as refused:
                self._reconsider(turn, refused)
            else:
                return

    def _reconsider(self, turn: Turn, refused: RefusedByEngine) -> None:
        """Change what of a refused leg was ours.

        Raises:
            RefusedByEngine: Nothing was: the request itself is at fault.
        """
        if turn.own_tokens is None and prompt_tokens.are_refused(refused.answer.body):
            # The refusal has freed the computed prompt, so prefill is asked again.
            turn.own_tokens = Tokenised.REJECTED
        elif refused.role is Role.PREFILL and turn.request.path == MESSAGES_PATH and turn.tried.alone is None:
            # This API reads its one token as a whole answer, and may fail at half a tool call.
            turn.tried.alone = Reason.UNSUPPORTED
        else:
            raise refused

    async def _begin_transfer(self, turn: Turn, plan: RoutePlan) -> Transfer:
        attempt = turn.attempt(plan, token_ids=self._wants_tokens(turn))
        try:
            return await self._transfer.begin(attempt)
        except UpstreamFault as fault:
            if plan.prefill is None:
                raise
            self._legs.unprepared(turn.tried, plan.prefill, fault)

    def _wants_tokens(self, turn: Turn) -> bool:
        """Whether decode takes the prompt's tokens from prefill's answer."""
        return turn.own_tokens is None and self._transfer.order is LegOrder.IN_TURN

    async def _prefill(self, turn: Turn, plan: RoutePlan, transfer: Transfer) -> PrefillAnswer:
        if plan.prefill is None:
            return NOTHING_KNOWN
        asked = transfer.prefill
        body = prefill_body(turn.request, asked.params, token_ids=self._wants_tokens(turn))
        with self._legs.run(
            turn.tried,
            plan.prefill,
            tokens=plan.prefill_tokens,
            then=plan.decode if self._transfer.order is LegOrder.IN_TURN else None,
            had_handle=transfer.pulls,
        ) as leg:
            answer = await self._client.post(
                plan.prefill.url,
                turn.request.path,
                body=encode_from(turn.request.body, {**body, **asked.fields}),
                headers={**turn.engine_headers, **leg.headers, **asked.headers},
                timeout_s=self._settings.prefill_timeout_s,
            )
            check_answer(answer)
            try:
                prefilled = transfer.read_prefill(answer.body)
            except ValueError as error:
                raise LegFailed(
                    UpstreamFault(f"Engine {plan.prefill.url} gave an unusable answer: {error}.")
                ) from error
        _soon(
            self._placer.prefilled,
            plan,
            turn.request.chain,
            transfer.account(prefilled, None),
            ahead=leg.ahead_tokens,
            seconds=leg.seconds,
            now_s=time.monotonic(),
        )
        return prefilled

    async def _decode(
        self,
        turn: Turn,
        plan: RoutePlan,
        transfer: Transfer,
        reply: Reply,
        prefilling: asyncio.Future[PrefillAnswer],
    ) -> None:
        prefilled = prefilling.result() if prefilling.done() else NOTHING_KNOWN
        asked = transfer.decode(prefilled)
        body = self._tokens.body(
            turn.request, asked.params, prefilled.token_ids, turn.own_tokens, fields=asked.fields
        )
        reuse = transfer.account(prefilled, plan.reason)
        turn.watch.planned(plan, reuse)
        had_handle = plan.prefill is not None and asked.params is not None
        with self._legs.run(
            turn.tried, plan.decode, had_handle=had_handle, alone_by_choice=plan.alone_by_choice
        ) as leg:
            async with self._client.stream(
                plan.decode.url,
                turn.request.path,
                body=body,
                headers={**turn.engine_headers, **leg.headers, **asked.headers},
                waits=self._waits(turn),
                began=began_of(turn.request),
            ) as answer:
                if answer.status == 200:
                    turn.ttft_s = time.monotonic() - turn.watch.arrived_s
                    self._keep_response(turn, plan)
                    reuse = transfer.account(await prefilling, plan.reason)
                    turn.watch.planned(plan, reuse)
                    turn.watch.answers(turn.ttft_s)
                    _soon(self._metrics.ttft_seconds.labels(reuse.reason).observe, turn.ttft_s)
                    if answer.is_event_stream:
                        _soon(self._placer.streamed, plan, seconds=leg.seconds, now_s=time.monotonic())
                reply.extra[REUSE_HEADER.encode()] = reuse.format().encode()
                failure = await relay(
                    turn.watch.reading(answer),
                    reply,
                    lambda: self._succeeded(turn, plan, reuse, reply, retained=asked.params is not None),
                    show=transfer.show,
                    last_resort=turn.tried.failure is not None,
                )
                leg.broke = failure == "mid_stream"
        if failure is not None:
            self._count_failure(turn, failure)

    def _keep_response(self, turn: Turn, plan: RoutePlan) -> None:
        """Remember where the answer is, if the client may come back to it."""
        request = turn.request
        if request.response_id is not None and request.stored:
            kept = Kept(plan.decode.url, turn.match.key, request.chain.whole)
            self._state.keep_response(request.scope.tenant, request.response_id, kept)

    def _waits(self, turn: Turn) -> StreamWaits:
        streamed = bool(turn.request.body.get("stream"))
        first_byte_s = self._settings.first_byte_timeout_s if streamed else self._settings.decode_timeout_s
        if self._transfer.order is LegOrder.AT_ONCE:
            first_byte_s += self._settings.prefill_timeout_s
        return StreamWaits(first_byte_s, self._settings.idle_timeout_s)

    async def _succeeded(
        self, turn: Turn, plan: RoutePlan, reuse: ReuseHeader, reply: Reply, *, retained: bool
    ) -> None:
        """Record a turn. One that left nothing retained hides no earlier turn that did."""
        if plan.prefill is None:
            reuse = turn.watch.alone(reuse)
            reply.extra[REUSE_HEADER.encode()] = reuse.format().encode()
        turn.watch.succeeded()
        self._legs.settle(turn.tried)
        self._placer.ended(plan, turn.request.chain, reuse, time.monotonic())
        self._metrics.turn_answered(reuse)
        self._metrics.turn_placed(plan)
        if not turn.request.recorded:
            return
        commits = retained or turn.match.home is None
        holder = Holder(plan.decode.url, plan.decode.indexes) if commits else None
        record = TurnRecord.of(turn.match.digest, plan, reuse, ttft_s=turn.ttft_s, at_s=time.monotonic())
        await self._state.commit(turn.match, turn.request.scope, record, holder)

    def _count_failure(self, turn: Turn, cause: str) -> None:
        turn.watch.failed(cause)
        self._metrics.failed_turns.labels(cause).inc()


def _soon(note: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
    """Take a note once what is about to be sent is on its way: somebody waits for that."""
    asyncio.get_running_loop().call_soon(partial(note, *arguments, **named))
