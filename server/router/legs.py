"""One leg of a turn: counted in and out, and its end weighed: for the engine's circuit, and for the turn's next attempt."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from bidikv_server.reasons import Reason
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.policy import Excluded
from bidikv_server.router.errors import UpstreamConnectFailed, UpstreamFault
from bidikv_server.router.relay import LegFailed, RefusedByEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bidikv_server.router.core.engines import EngineSnapshot, EngineTable
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.metrics import RouterMetrics
    from bidikv_server.router.watch import TurnWatch

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tried:
    """What one turn has tried so far.

    Attributes:
        watch: Sees what becomes of it.
        alone: Why it runs on decode alone, once that is decided.
        excluded: Engines that it tried in vain.
        failure: What went wrong last.
        retry_after_s: The least time after which an engine that refused asked to be tried again.
        barred: Why nothing may be read back any more: prefill failed at it.
        together: Decode failed at doing it alone where prefill might have helped: now prefill has to.
        suspects: Engines that gave it an error answer. Whether they are at fault shows when another one answers well: a
            request that every engine fails at is no reason to leave them all alone.
    """

    watch: TurnWatch
    alone: Reason | None
    excluded: Excluded = field(default_factory=Excluded)
    failure: LegFailed | None = None
    retry_after_s: float | None = None
    barred: Reason | None = None
    together: bool = False
    suspects: list[tuple[EngineUrl, Role]] = field(default_factory=list)

    def forgive(self) -> None:
        """Try the engines again that refused for now."""
        self.excluded = Excluded(self.excluded.prefill, self.excluded.decode)
        self.retry_after_s = None


@dataclass(slots=True)
class Leg:
    """One that runs.

    Attributes:
        ahead_tokens: Tokens that were to be computed on its engine before its own.
        started_s: When it began.
        headers: To send with it in place of the turn's own of the same name.
        broke: Its answer broke off after the client had seen some of it.
    """

    ahead_tokens: int
    started_s: float
    headers: Mapping[str, str]
    broke: bool = False

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started_s


class Legs:
    """Runs legs, and judges engines by them."""

    def __init__(
        self,
        engines: EngineTable,
        metrics: RouterMetrics,
        *,
        may_run_alone: bool,
        engine_down: Callable[[EngineUrl], None],
    ) -> None:
        """Judge these engines.

        Args:
            engines: Where their state is noted.
            metrics: Where their legs are counted.
            may_run_alone: A turn may run on decode without prefill.
            engine_down: Told of every engine that a leg finds down.
        """
        self._engine_down = engine_down
        self._engines = engines
        self._metrics = metrics
        self._may_run_alone = may_run_alone

    @contextlib.contextmanager
    def run(
        self,
        tried: Tried,
        engine: EngineSnapshot,
        *,
        tokens: int = 0,
        then: EngineSnapshot | None = None,
        had_handle: bool = False,
        alone_by_choice: bool = False,
    ) -> Iterator[Leg]:
        """Count a leg in and out, and turn its failure into one engine or option less for its turn.

        Args:
            tried: What its turn has tried.
            engine: Where it runs.
            tokens: About how many it will compute.
            then: The decode engine that its turn is on its way to, while its prompt is computed here.
            had_handle: It has to pull, and may fail at that alone.
            alone_by_choice: Decode does without prefill although it need not, and may fail at that alone.

        Raises:
            LegFailed: In place of every fault of the engine or its connection.
        """
        outcome = "cancelled"
        watched = tried.watch.leg(engine.role, engine.url)
        ahead = self._engines.leg_started(engine.url, engine.role, tokens)
        leg = Leg(ahead, time.monotonic(), watched.headers)
        if then is not None:
            self._engines.turn_expected(then.url, 1)
        try:
            yield leg
            outcome = "broke" if leg.broke else "ok"
            self._judge(engine.url, engine.role, failed=leg.broke)
        except UpstreamFault as fault:
            outcome = fault.code
            self._weigh(engine, fault)
            self._give_up(tried, engine, LegFailed(fault), had_handle=False)
        except LegFailed as failed:
            outcome = "busy" if failed.refused else "failed"
            if not failed.refused:
                self._suspect(tried, engine, failed)
            self._give_up(tried, engine, failed, had_handle=had_handle, alone_by_choice=alone_by_choice)
        except RefusedByEngine as refused:
            outcome, refused.role = "refused", engine.role
            raise
        finally:
            self._engines.leg_ended(engine.url, engine.role, tokens)
            if then is not None:
                self._engines.turn_expected(then.url, -1)
            seconds = leg.seconds
            watched.ended(outcome, seconds)
            self._metrics.leg_seconds.labels(engine.role, outcome).observe(seconds)

    def unprepared(self, tried: Tried, engine: EngineSnapshot, fault: UpstreamFault) -> NoReturn:
        """Turn a fault in what has to be known before a leg into one engine less for its turn.

        Raises:
            LegFailed: In place of the fault.
        """
        self._give_up(tried, engine, LegFailed(fault), had_handle=False)

    def settle(self, tried: Tried) -> None:
        """A turn was answered well after all: what failed it before was at fault."""
        for url, role in tried.suspects:
            self._judge(url, role, failed=True)
        tried.suspects.clear()

    def _weigh(self, engine: EngineSnapshot, fault: UpstreamFault) -> None:
        if not isinstance(fault, UpstreamConnectFailed):
            self._judge(engine.url, engine.role, failed=True)
        elif self._engines.connect_failed(engine.url, engine.role):
            self._engine_down(engine.url)
            _log.warning("%s engine %s is down: %s", engine.role, engine.url, fault)

    def _suspect(self, tried: Tried, engine: EngineSnapshot, failed: LegFailed) -> None:
        if failed.answer is not None:
            tried.suspects.append((engine.url, engine.role))
        else:
            self._judge(engine.url, engine.role, failed=True)

    def _judge(self, url: EngineUrl, role: Role, *, failed: bool) -> None:
        if not failed:
            if self._engines.leg_succeeded(url, role):
                _log.info("%s engine %s works again: its circuit is closed", role, url)
        elif self._engines.leg_failed(url, role, time.monotonic()):
            self._metrics.circuits_opened.labels(role, url).inc()
            _log.warning("legs keep failing on %s engine %s: its circuit is open for a while", role, url)

    def _give_up(
        self,
        tried: Tried,
        engine: EngineSnapshot,
        failed: LegFailed,
        *,
        had_handle: bool,
        alone_by_choice: bool = False,
    ) -> NoReturn:
        """Leave an engine out of the turn's next attempt.

        An engine that answers but fails with a handle may have failed at pulling. Prefill gets the request once more,
        with nothing to pull; so does a decode engine that is the only one left. If that one failed at a turn that it did
        alone by choice, prefill takes part the second time.
        """
        _log.warning("turn %s: %s leg failed: %s", tried.watch.request_id, engine.role, failed)
        self._metrics.retries.labels(engine.role).inc()
        tried.failure = failed
        if failed.refused:
            tried.excluded = tried.excluded.refusing(engine.role, engine.url)
            if failed.retry_after_s is not None:
                tried.retry_after_s = min(failed.retry_after_s, tried.retry_after_s or failed.retry_after_s)
        elif had_handle and engine.role is Role.PREFILL:
            tried.barred = Reason.TRANSFER_FAILED
        elif had_handle and self._may_run_alone and not self._has_other_decode(tried, engine):
            tried.alone = Reason.TRANSFER_FAILED
        elif alone_by_choice and not self._has_other_decode(tried, engine):
            tried.together = True
        else:
            tried.excluded = tried.excluded.failed(engine.role, engine.url)
        raise failed

    def _has_other_decode(self, tried: Tried, engine: EngineSnapshot) -> bool:
        return any(
            other.takes_legs and other.url != engine.url and tried.excluded.takes(other)
            for other in self._engines.snapshots(Role.DECODE)
        )
