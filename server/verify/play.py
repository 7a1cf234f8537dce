"""Plays one conversation: each turn warm and cold, judged at once."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol
from uuid import uuid4

from bidikv_server.verify.client import FailureKind, RequestFailed
from bidikv_server.verify.judge import Verdict, compare, is_cold, is_near_tie
from bidikv_server.verify.plan import Op, Turn
from bidikv_server.verify.requests import (
    Naming,
    Request,
    cold_key,
    cold_request,
    warm_request,
    with_logprobs,
)
from bidikv_server.verify.results import TurnRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bidikv_server.verify.answers import Answer
    from bidikv_server.verify.client import Client

_RETRY_S: Final = 0.5
_PATIENCE_S: Final = 240.0
"""Above what a killed engine takes to serve again."""


class Outages(Protocol):
    """What disturbs the run."""

    async def turn_begins(self) -> None:
        """Another turn is about to be played; returns when it may be."""

    def excuses(self, started_s: float) -> bool:
        """Whether something was down at some time since then, in seconds of the monotonic clock."""


class Quiet:
    """Nothing does."""

    async def turn_begins(self) -> None:
        """Do nothing."""

    def excuses(self, started_s: float) -> bool:  # noqa: ARG002
        """A failure has no excuse."""
        return False


@dataclass(frozen=True, slots=True)
class _Judged:
    verdict: Verdict
    detail: str | None = None
    warm: Answer | None = None
    cold: Answer | None = None


@dataclass(slots=True)
class Player:
    """One conversation under way.

    Attributes:
        client: Where requests go.
        number: The conversation's.
        naming: How its requests are told from others.
        margin: Of a near tie.
        token_ids: Answers tell their token ids.
        outages: What disturbs the run.
    """

    client: Client
    number: int
    naming: Naming
    margin: float
    token_ids: bool
    outages: Outages
    _answers: dict[int, Answer] = field(default_factory=dict)
    _cold: dict[str, Answer] = field(default_factory=dict)
    _retries: int = 0

    async def play(self, turns: list[Turn]) -> AsyncIterator[TurnRecord]:
        """All turns in order; ends early when one got no answer, which later ones would have to repeat."""
        for turn in turns:
            await self.outages.turn_begins()
            record = await self._play(turn)
            yield record
            if turn.index not in self._answers:
                return
            if turn.expires and self.naming.ttl_pause_s:
                await asyncio.sleep(self.naming.ttl_pause_s)

    async def _play(self, turn: Turn) -> TurnRecord:
        self._retries = 0
        started_s = time.monotonic()
        seconds = 0.0
        warm: list[Answer] = []
        try:
            warm = await self._ask_warm(turn)
            seconds = time.monotonic() - started_s
            self._answers[turn.index] = warm[-1]
            judged = await self._judge(turn, warm)
        except RequestFailed as failed:
            verdict = Verdict.HUNG if failed.kind is FailureKind.HUNG else Verdict.FAILED
            asked = "the cold run" if warm else "the turn"
            judged = _Judged(verdict, f"{asked}: {failed}")
        return self._record(turn, warm[-1] if warm else None, judged, seconds or time.monotonic() - started_s)

    async def _ask_warm(self, turn: Turn) -> list[Answer]:
        request = warm_request(turn, self._answers, self.naming)
        if turn.op is not Op.RETRY:
            return [await self._ask(request)]
        if turn.cancel_first:
            _, answer = await asyncio.gather(self._leave(request), self._ask(request))
            return [answer]
        return list(await asyncio.gather(self._ask(request), self._ask(request)))

    async def _leave(self, request: Request) -> None:
        with suppress(RequestFailed):  # Nobody waits for its answer; the other request tells what is wrong.
            await self.client.ask_and_leave(request)

    async def _judge(self, turn: Turn, warm: list[Answer]) -> _Judged:
        cold = await self._ask_cold(turn)
        if not is_cold(cold):
            return _Judged(Verdict.FAILED, f"the cold run was not cold: {cold.reuse}", warm[0], cold)
        verdicts = [await self._compare(turn, answer, cold) for answer in warm]
        return max(verdicts, key=lambda judged: list(Verdict).index(judged.verdict))

    async def _compare(self, turn: Turn, warm: Answer, cold: Answer) -> _Judged:
        difference = compare(warm, cold)
        if difference is None:
            return _Judged(Verdict.SAME)
        runs = [
            await self._ask(with_logprobs(request, token_ids=bool(cold.token_ids)))
            for request in (
                cold_request(turn, self._answers, self.naming, uuid4().hex),
                warm_request(turn, self._answers, self.naming),
            )
        ]
        near = is_near_tie(difference, warm, cold, runs, self.margin)
        return _Judged(Verdict.NEAR_TIE if near else Verdict.MISMATCH, difference.describe(), warm, cold)

    async def _ask_cold(self, turn: Turn) -> Answer:
        key = cold_key(turn, self._answers, self.naming)
        if key not in self._cold:
            request = cold_request(turn, self._answers, self.naming, uuid4().hex)
            self._cold[key] = await self._ask(request)
        return self._cold[key]

    async def _ask(self, request: Request) -> Answer:
        """The answer; a clear failure during an outage is tried again.

        Raises:
            RequestFailed: There is none, and no outage explains it.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            started_s = time.monotonic()
            try:
                return await self.client.ask(request)
            except RequestFailed as failed:
                excused = failed.clear and self.outages.excuses(started_s)
                if not excused or time.monotonic() > deadline_s:
                    raise
            self._retries += 1
            await asyncio.sleep(_RETRY_S)

    def _record(self, turn: Turn, answer: Answer | None, judged: _Judged, seconds: float) -> TurnRecord:
        reuse = answer.reuse if answer else None
        return TurnRecord(
            conversation=self.number,
            turn=turn.index,
            op=turn.op,
            branch=turn.branch,
            endpoint=turn.endpoint,
            stream=turn.stream,
            verdict=judged.verdict,
            seconds=round(seconds, 3),
            retries=self._retries,
            reason=reuse.reason if reuse else None,
            prompt_tokens=reuse.prompt_tokens if reuse else None,
            remote_tokens=reuse.remote_tokens if reuse else None,
            local_tokens=reuse.local_tokens if reuse else None,
            computed_tokens=reuse.computed_tokens if reuse else None,
            detail=judged.detail,
            warm=judged.warm.said() if judged.warm else None,
            cold=judged.cold.said() if judged.cold else None,
        )
