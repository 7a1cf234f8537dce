"""A turn from plan to last byte: prefill leg, decode leg, and what to do when one of them fails.

Until the client has seen a byte, a failed leg is tried elsewhere; after that, a failure ends the stream with an error
event. Only a turn that ended cleanly takes its place in the conversation table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bidikv.headers import KEY_HEADER, REUSE_HEADER, SESSION_HEADER
from bidikv_server import wire
from bidikv_server.reasons import Reason
from bidikv_server.router.core import prompt_tokens
from bidikv_server.router.core.accounts import (
    NOTHING_KNOWN,
    PrefillAnswer,
    read_prefill_answer,
    with_reason,
)
from bidikv_server.router.core.bodies import (
    decode_params,
    prefill_body,
    returns_token_ids,
    runs_alone,
)
from bidikv_server.router.core.content import names_media
from bidikv_server.router.core.conversations import Holder, Match
from bidikv_server.router.core.engines import EngineTable, Role
from bidikv_server.router.core.history import TurnRecord
from bidikv_server.router.core.ids import salt_of
from bidikv_server.router.core.json_bytes import encode_from
from bidikv_server.router.core.kept import Kept
from bidikv_server.router.core.paths import MESSAGES_PATH
from bidikv_server.router.core.policy import (
    Excluded,
    NoHealthyEngine,
    Placement,
    Retention,
    RoutePlan,
    plan_route,
)
from bidikv_server.router.core.prompt_tokens import Tokenised
from bidikv_server.router.errors import (
    EngineRefusesRouter,
    NoEngineAvailable,
    ResponseUnreachable,
    UpstreamConnectFailed,
    UpstreamFault,
)
from bidikv_server.router.relay import LegFailed, RefusedByEngine, check_answer, relay
from bidikv_server.router.responses import began_of
from bidikv_server.router.tokens import PromptTokens
from bidikv_server.router.upstream import EngineClient, StreamWaits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.access import Access
    from bidikv_server.router.core.engines import EngineSnapshot
    from bidikv_server.router.core.policy import Keep
    from bidikv_server.router.core.requests import TurnRequest
    from bidikv_server.router.metrics import RouterMetrics
    from bidikv_server.router.replies import Reply
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.state.store import StateStore
    from bidikv_server.router.watch import TurnWatch

_log = logging.getLogger(__name__)
_SESSION = KEY_HEADER.encode()


@dataclass(slots=True)
class _Turn:
    """One turn under way.

    Attributes:
        request: What the client asks for.
        match: Its place among the known turns.
        engine_headers: Headers for both legs.
        watch: Sees what becomes of it.
        keep: What decode does with its blocks.
        barred: Why nothing may be read back for it.
        excluded: Engines that failed it.
        alone: Why it runs on decode alone, once that is decided.
        own_tokens: Why decode finds the prompt's tokens itself; None lets it take prefill's.
        failure: What went wrong last.
        ttft_s: From the whole request to the first byte of the answer's body.
        done: The answer is complete.
    """

    request: TurnRequest
    match: Match
    engine_headers: dict[str, str]
    watch: TurnWatch
    keep: Keep
    barred: Reason | None
    alone: Reason | None
    own_tokens: Tokenised | None
    excluded: Excluded = field(default_factory=Excluded)
    failure: LegFailed | None = None
    ttft_s: float = 0.0
    done: bool = False


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
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._state = state
        self._client = client
        self._metrics = metrics
        self._access = access
        self._tokens = PromptTokens(settings, metrics)
        self._retention = Retention(settings.default_ttl_s, settings.max_ttl_s)

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
        turn = await self._begin(request, passed_on, watch)
        watch.asked(request, turn.match.key)
        self._metrics.identities.labels(request.identity.source).inc()
        reply.extra[_SESSION] = turn.match.key.encode()
        try:
            await self._attempts(turn, reply)
        except asyncio.CancelledError:
            if not turn.done:
                self._metrics.failed_turns.labels("client_gone").inc()
            raise
        except RefusedByEngine as refused:
            self._check_credential(turn, refused.answer.status)
            self._count_failure(turn, "refused_by_engine")
            await reply.whole(refused.answer.status, refused.answer.headers, refused.answer.body)
        except LegFailed as failed:
            self._count_failure(turn, failed.fault.code)
            if failed.answer is None:
                raise failed.fault from failed
            await reply.whole(failed.answer.status, failed.answer.headers, failed.answer.body)

    def _check_credential(self, turn: _Turn, status: int) -> None:
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

    async def _begin(self, request: TurnRequest, passed_on: dict[str, str], watch: TurnWatch) -> _Turn:
        match = await self._state.find(request.scope, request.session, request.chain)
        if request.kept is not None and request.session is None:
            match = replace(match, key=request.kept.conversation)
        barred = self._barred(request)
        return _Turn(
            request=request,
            match=match,
            engine_headers={**passed_on, SESSION_HEADER: match.key, "Content-Type": "application/json"},
            watch=watch,
            keep=self._retention.keep(request.turn, readback=barred is None),
            barred=barred,
            alone=runs_alone(request),
            own_tokens=self._tokens.obstacle(request),
        )

    def _barred(self, request: TurnRequest) -> Reason | None:
        """Why nothing of this turn may be reused."""
        if not (self._settings.readback and request.readback):
            return Reason.READBACK_OFF
        return Reason.UNSUPPORTED if names_media(request.body) else None

    async def _attempts(self, turn: _Turn, reply: Reply) -> None:
        """Try until an engine pair answers; every failed attempt leaves one engine or one option less."""
        while True:
            plan = self._plan(turn)
            try:
                answer = await self._prefill(turn, plan)
                await self._decode(turn, plan, answer, reply)
            except LegFailed as failed:
                turn.failure = failed
            except RefusedByEngine as refused:
                self._reconsider(turn, refused)
            else:
                return

    def _reconsider(self, turn: _Turn, refused: RefusedByEngine) -> None:
        """Change what of a refused leg was ours.

        Raises:
            RefusedByEngine: Nothing was: the request itself is at fault.
        """
        if turn.own_tokens is None and prompt_tokens.are_refused(refused.answer.body):
            # The refusal has freed the computed prompt, so prefill is asked again.
            turn.own_tokens = Tokenised.REJECTED
        elif refused.role is Role.PREFILL and turn.request.path == MESSAGES_PATH and turn.alone is None:
            # This API reads its one token as a whole answer, and may fail at half a tool call.
            turn.alone = Reason.UNSUPPORTED
        else:
            raise refused

    def _plan(self, turn: _Turn) -> RoutePlan:
        if turn.request.kept is not None:
            return self._plan_kept(turn, turn.request.kept)
        try:
            return plan_route(
                turn.match,
                [*self._engines.snapshots(Role.PREFILL), *self._engines.snapshots(Role.DECODE)],
                barred=turn.barred,
                alone=turn.alone,
                prefill_required=not self._settings.prefill_fallback,
                excluded=turn.excluded,
            )
        except NoHealthyEngine as error:
            if turn.failure is not None:
                raise turn.failure from error
            raise NoEngineAvailable(error.role) from error

    def _plan_kept(self, turn: _Turn, kept: Kept) -> RoutePlan:
        """Run where the earlier response is, also on an engine that is being emptied: nobody else has it."""
        for engine in self._engines.snapshots(Role.DECODE):
            if engine.url == kept.engine and engine.healthy and engine.url not in turn.excluded.decode:
                return RoutePlan(engine, None, (), turn.alone, Placement.KEPT_RESPONSE)
        raise turn.failure or ResponseUnreachable

    async def _prefill(self, turn: _Turn, plan: RoutePlan) -> PrefillAnswer:
        if plan.prefill is None:
            return NOTHING_KNOWN
        path, wanted = turn.request.path, turn.own_tokens is None
        params = wire.prefill_leg(
            conversation=turn.match.key,
            salt=salt_of(turn.request.scope),
            sources=list(plan.sources),
            return_token_ids=wanted and not returns_token_ids(path),
        )
        with self._leg(turn, plan.prefill) as headers:
            answer = await self._client.post(
                plan.prefill.url,
                path,
                body=encode_from(turn.request.body, prefill_body(turn.request, params, token_ids=wanted)),
                headers=headers,
                timeout_s=self._settings.prefill_timeout_s,
            )
            check_answer(answer)
            try:
                return read_prefill_answer(answer.body)
            except ValueError as error:
                raise LegFailed(
                    UpstreamFault(f"Engine {plan.prefill.url} gave an unreadable answer.")
                ) from error

    async def _decode(self, turn: _Turn, plan: RoutePlan, prefilled: PrefillAnswer, reply: Reply) -> None:
        params = decode_params(
            prefilled.handle,
            conversation=turn.match.key,
            salt=salt_of(turn.request.scope),
            keep=turn.keep,
        )
        body = self._tokens.body(turn.request, params, prefilled.token_ids, turn.own_tokens)
        reuse = with_reason(prefilled.reuse, plan.reason)
        reply.extra[REUSE_HEADER.encode()] = reuse.format().encode()
        turn.watch.planned(plan, reuse)
        with self._leg(turn, plan.decode, had_handle=params is not None) as headers:
            async with self._client.stream(
                plan.decode.url,
                turn.request.path,
                body=body,
                headers=headers,
                waits=self._waits(turn),
                began=began_of(turn.request),
            ) as answer:
                if answer.status == 200:
                    self._keep_response(turn, plan)
                    turn.ttft_s = time.monotonic() - turn.watch.arrived_s
                    turn.watch.answers(turn.ttft_s)
                    self._metrics.ttft_seconds.labels(reuse.reason).observe(turn.ttft_s)
                failure = await relay(
                    turn.watch.reading(answer),
                    reply,
                    lambda: self._succeeded(turn, plan, reuse),
                    last_resort=turn.failure is not None,
                )
        if failure is not None:
            self._count_failure(turn, failure)

    def _keep_response(self, turn: _Turn, plan: RoutePlan) -> None:
        """Remember where the answer is, if the client may come back to it."""
        request = turn.request
        if request.response_id is not None and request.stored:
            kept = Kept(plan.decode.url, turn.match.key, request.chain.whole)
            self._state.keep_response(request.scope.tenant, request.response_id, kept)

    def _waits(self, turn: _Turn) -> StreamWaits:
        streamed = bool(turn.request.body.get("stream"))
        first_byte_s = self._settings.first_byte_timeout_s if streamed else self._settings.decode_timeout_s
        return StreamWaits(first_byte_s, self._settings.idle_timeout_s)

    async def _succeeded(self, turn: _Turn, plan: RoutePlan, reuse: ReuseHeader) -> None:
        """Record a turn. One that ran alone left nothing retained, so it hides no earlier turn that did."""
        turn.done = True
        turn.watch.succeeded()
        self._metrics.turn_answered(reuse)
        self._metrics.placements.labels(plan.placement).inc()
        if not turn.request.recorded:
            return
        retained = plan.prefill is not None or turn.match.home is None
        holder = Holder(plan.decode.url, plan.decode.indexes) if retained else None
        record = TurnRecord.of(turn.match.digest, plan, reuse, ttft_s=turn.ttft_s, at_s=time.monotonic())
        await self._state.commit(turn.match, turn.request.scope, record, holder)

    @contextlib.contextmanager
    def _leg(
        self, turn: _Turn, engine: EngineSnapshot, *, had_handle: bool = False
    ) -> Iterator[dict[str, str]]:
        """Count a leg in and out, and turn its failure into one engine or option less for this turn; yields its headers."""
        started_s, outcome = time.monotonic(), "cancelled"
        self._engines.leg_started(engine.url, engine.role)
        watched = turn.watch.leg(engine.role, engine.url)
        try:
            yield {**turn.engine_headers, **watched.headers}
            outcome = "ok"
        except UpstreamFault as fault:
            outcome = fault.code
            if isinstance(fault, UpstreamConnectFailed) and self._engines.connect_failed(
                engine.url, engine.role
            ):
                _log.warning("%s engine %s is down: %s", engine.role, engine.url, fault)
            self._give_up(turn, engine, LegFailed(fault), had_handle=False)
        except LegFailed as failed:
            outcome = "failed"
            self._give_up(turn, engine, failed, had_handle=had_handle)
        except RefusedByEngine as refused:
            outcome, refused.role = "refused", engine.role
            raise
        finally:
            self._engines.leg_ended(engine.url, engine.role)
            seconds = time.monotonic() - started_s
            watched.ended(outcome, seconds)
            self._metrics.leg_seconds.labels(engine.role, outcome).observe(seconds)

    def _give_up(self, turn: _Turn, engine: EngineSnapshot, failed: LegFailed, *, had_handle: bool) -> None:
        """Leave an engine out of this turn's next attempt.

        A decode engine that answers but fails with a handle may have failed at pulling. If it is the only one left,
        it gets the request once more without a handle.
        """
        _log.warning("turn %s: %s leg failed: %s", turn.watch.request_id, engine.role, failed)
        self._metrics.retries.labels(engine.role).inc()
        excluded = turn.excluded
        if engine.role is Role.PREFILL:
            turn.excluded = replace(excluded, prefill=excluded.prefill | {engine.url})
        elif had_handle and self._settings.prefill_fallback and not self._has_other_decode(turn, engine):
            turn.alone = Reason.TRANSFER_FAILED
        else:
            turn.excluded = replace(excluded, decode=excluded.decode | {engine.url})
        raise failed

    def _has_other_decode(self, turn: _Turn, engine: EngineSnapshot) -> bool:
        return any(
            other.takes_legs and other.url != engine.url and other.url not in turn.excluded.decode
            for other in self._engines.snapshots(Role.DECODE)
        )

    def _count_failure(self, turn: _Turn, cause: str) -> None:
        turn.watch.failed(cause)
        self._metrics.failed_turns.labels(cause).inc()
