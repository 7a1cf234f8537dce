"""Watching a turn: everything that happens to it comes by here once, and ends as one report.

The report becomes the turn's line in the log, its span, and its place among the recent turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.accounts import of_decode_alone
from bidikv_server.router.core.ids import accept_request_id
from bidikv_server.router.core.reports import OK, LegReport, TurnReport, fields, readable_model
from bidikv_server.router.core.spotting import AnswerSpotter
from bidikv_server.router.errors import BadRequest, ClientGone, RouterFault, ShuttingDown
from bidikv_server.router.logs import log_fields
from bidikv_server.router.replies import headers_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.core.engines import Role
    from bidikv_server.router.core.ids import ConversationKey, EngineUrl
    from bidikv_server.router.core.policy import RoutePlan
    from bidikv_server.router.core.recent import RecentTurns
    from bidikv_server.router.core.requests import TurnRequest
    from bidikv_server.router.metrics import RouterMetrics
    from bidikv_server.router.replies import Reply, Scope
    from bidikv_server.router.tracing import LegTrace, Tracing, TurnTrace
    from bidikv_server.router.upstream import StreamedAnswer

_log = logging.getLogger("bidikv_server.router.turn")
_WATCH: Final = "bidikv.watch"
CLIENT_GONE: Final = "client_gone"
_UNTOLD_S: Final = 0.005
"""How long a turn's line may wait."""


class LegWatch:
    """One leg under way.

    Attributes:
        headers: To send with it in place of the client's own of the same name.
    """

    def __init__(self, turn: TurnWatch, role: Role, engine: EngineUrl, trace: LegTrace) -> None:
        self.headers = trace.headers
        self._turn = turn
        self._role = role
        self._engine = engine
        self._trace = trace

    def ended(self, outcome: str, seconds: float) -> None:
        """How it went, as `bidikv_router_leg_seconds` has it."""
        report = LegReport(self._role, self._engine, outcome, seconds)
        self._turn.legs.append(report)
        self._trace.end(report)


class TurnWatch:
    """One turn under way, as it is seen. Its methods only take notes.

    Attributes:
        request_id: The client's, if engines and logs can carry it, else a new one.
        arrived_s: When the request was complete, on the monotonic clock; before that, when it began.
        legs: Those that have ended.
    """

    def __init__(self, path: str, headers: Mapping[str, str], tracing: Tracing) -> None:
        self.request_id = accept_request_id(headers.get("x-request-id")) or uuid.uuid4().hex
        self.legs: list[LegReport] = []
        self._path = path
        self._started_s = self.arrived_s = time.monotonic()
        self._trace: TurnTrace = tracing.turn(path, headers)
        self._queued_s = 0.0
        self._request: TurnRequest | None = None
        self._key: ConversationKey | None = None
        self._tenant: str | None = None
        self._plan: RoutePlan | None = None
        self._reuse: ReuseHeader | None = None
        self._ttft_s: float | None = None
        self._outcome: str | None = None
        self._spotter: AnswerSpotter | None = None

    def arrived(self) -> None:
        """The request is complete."""
        self.arrived_s = time.monotonic()

    def began(self, tenant: str | None) -> None:
        """It has its place, and may have waited for it; whose it is, if API keys are configured."""
        self._queued_s, self._tenant = time.monotonic() - self.arrived_s, tenant

    def asked(self, request: TurnRequest, key: ConversationKey) -> None:
        """What the client wants, and of which conversation."""
        self._request, self._key = request, key

    def planned(self, plan: RoutePlan, reuse: ReuseHeader) -> None:
        """Prefill is through and decode answers now. A later attempt takes the place of an earlier one."""
        self._plan, self._reuse = plan, reuse

    def leg(self, role: Role, engine: EngineUrl) -> LegWatch:
        """A leg begins."""
        return LegWatch(self, role, engine, self._trace.leg(role, engine))

    def reading(self, answer: StreamedAnswer) -> StreamedAnswer:
        """The answer, watched as it is read where that is of use."""
        alone = self._plan is not None and self._plan.prefill is None
        if answer.status != 200 or not (alone or self._trace.wants_answer):
            return answer
        self._spotter = spotter = AnswerSpotter(is_stream=answer.is_event_stream)
        spotter.feed(answer.first)
        return replace(answer, rest=_fed(answer.rest, spotter))

    def alone(self, reuse: ReuseHeader) -> ReuseHeader:
        """The account of a turn that decode has done alone, with what its answer told of the prompt."""
        if self._spotter is not None:
            self._reuse = reuse = of_decode_alone(reuse, self._spotter.usages())
        return reuse

    def answers(self, ttft_s: float) -> None:
        """The first byte of the answer's body is there."""
        self._ttft_s = ttft_s

    def succeeded(self) -> None:
        """It has ended cleanly, whatever its client does now."""
        self._outcome = OK

    def failed(self, cause: str) -> None:
        """It does not end cleanly. What was known first stays."""
        self._outcome = self._outcome or cause

    @property
    def is_under_way(self) -> bool:
        """Engines may work on it, and it has neither ended well nor failed."""
        return self._request is not None and self._outcome is None

    def ended(self, status: int | None, now_s: float) -> TurnReport:
        """The report; ends the span."""
        request, plan = self._request, self._plan
        spotter = self._spotter if self._trace.wants_answer else None
        report = TurnReport(
            request_id=self.request_id,
            path=self._path,
            outcome=self._outcome or OK,
            status=status,
            seconds=now_s - self._started_s,
            queued_s=self._queued_s,
            conversation=self._key,
            tenant=self._tenant,
            model=readable_model(request.scope.model) if request is not None else None,
            identity=request.identity.source if request is not None else None,
            reuse=self._reuse,
            placement=plan.placement if plan is not None else None,
            prefill_choice=plan.prefill_choice if plan is not None else None,
            mode=plan.mode if plan is not None else None,
            mode_reason=plan.mode_reason if plan is not None else None,
            prefill=plan.prefill.url if plan is not None and plan.prefill is not None else None,
            decode=plan.decode.url if plan is not None else None,
            ttft_s=self._ttft_s,
            legs=tuple(self.legs),
            response_id=spotter.response_id() if spotter is not None else None,
            output_tokens=spotter.output_tokens() if spotter is not None else None,
            trace_id=self._trace.trace_id,
        )
        self._trace.end(report)
        return report


class Observer:
    """Watches every turn of one router. One event loop only."""

    def __init__(self, tracing: Tracing, recent: RecentTurns, metrics: RouterMetrics) -> None:
        self._tracing = tracing
        self._recent = recent
        self._metrics = metrics
        self._untold: list[TurnReport] = []

    @contextlib.contextmanager
    def turn(self, scope: Scope, reply: Reply) -> Iterator[None]:
        """Around one request for a turn, refused or not; `watch_of` finds its watch."""
        watch = scope[_WATCH] = TurnWatch(scope["path"], headers_of(scope), self._tracing)
        reply.extra[b"x-request-id"] = watch.request_id.encode()
        cause: str | None = RouterFault.code
        status: int | None = RouterFault.status
        try:
            yield
        except RouterFault as fault:
            cause, status = fault.code, fault.status
            raise
        except RecursionError:
            cause, status = BadRequest.code, BadRequest.status
            raise
        except ClientGone:
            cause, status = CLIENT_GONE, None
            self._count_interrupted(watch, cause)
            raise
        except asyncio.CancelledError:
            cause, status = ShuttingDown.code, None
            self._count_interrupted(watch, cause)
            raise
        else:
            cause, status = None, None
        finally:
            if cause is not None:
                watch.failed(cause)
            now_s = time.monotonic()
            report = watch.ended(reply.status or status, now_s)
            self._recent.add(report, now_s)
            if _log.isEnabledFor(logging.INFO):
                self._tell_soon(report)

    def tell(self) -> None:
        """Write the lines of the turns that have ended."""
        untold, self._untold = self._untold, []
        for report in untold:
            _log.info("turn", extra=log_fields(fields(report)))

    def _tell_soon(self, report: TurnReport) -> None:
        """A client that has its answer may send its next turn at once, which does not wait for a line about this one."""
        self._untold.append(report)
        if len(self._untold) == 1:
            asyncio.get_running_loop().call_later(_UNTOLD_S, self.tell)

    def _count_interrupted(self, watch: TurnWatch, cause: str) -> None:
        """Only here it is known who ended a turn from outside: its client, or the router that stops."""
        if watch.is_under_way:
            self._metrics.failed_turns.labels(cause).inc()


def watch_of(scope: Scope) -> TurnWatch:
    """The watch of a request for a turn."""
    watch: TurnWatch = scope[_WATCH]
    return watch


async def _fed(rest: AsyncIterator[bytes], spotter: AnswerSpotter) -> AsyncIterator[bytes]:
    async for chunk in rest:
        spotter.feed(chunk)
        yield chunk
