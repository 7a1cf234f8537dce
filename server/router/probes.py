"""Background probes: which engines are up, and where decode engines' retention indexes are."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from bidikv_server import wire
from bidikv_server.router.core.engine_notes import read_notes
from bidikv_server.router.core.engines import EngineLoad, IndexInfo, Role
from bidikv_server.router.errors import UpstreamFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bidikv_server.router.core.engine_notes import EngineNotes
    from bidikv_server.router.core.engines import EngineTable
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.transfer.system import TransferSystem
    from bidikv_server.router.upstream import EngineClient

_log = logging.getLogger(__name__)
_ADDRESS: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")


def parse_index_info(exposition: str) -> tuple[IndexInfo, ...]:
    """The retention indexes that a decode engine publishes among its metrics, by data-parallel rank.

    Only the lines of this one metric are parsed: an engine writes hundreds of others.
    """
    lines = [line for line in exposition.splitlines() if line.startswith(wire.INDEX_INFO_METRIC + "{")]
    found: dict[str, IndexInfo] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                address = sample.labels.get("address", "")
                if sample.value > 0 and _ADDRESS.fullmatch(address):
                    found[sample.labels.get("engine", "")] = IndexInfo(
                        sample.labels.get("engine_id", ""), address
                    )
    except ValueError:
        _log.warning("a decode engine's %s cannot be read", wire.INDEX_INFO_METRIC)
        return ()
    return tuple(found[rank] for rank in sorted(found, key=lambda rank: (len(rank), rank)))


class Prober:
    """Asks every engine in turn, for ever.

    Attributes:
        notes: What decode engines told of themselves last.
    """

    def __init__(
        self,
        client: EngineClient,
        engines: EngineTable,
        *,
        transfer: TransferSystem,
        interval_s: float,
        timeout_s: float,
        came_up: Callable[[EngineUrl, float], None] = lambda _url, _now_s: None,
    ) -> None:
        """Know the engines to ask.

        Args:
            client: To ask them with.
            engines: Where it is noted.
            transfer: Learns what legs need to know of them.
            interval_s: Between two rounds.
            timeout_s: For one question.
            came_up: Told of every engine that was down, with the time on the monotonic clock.
        """
        self._transfer = transfer
        self._client = client
        self._engines = engines
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._came_up = came_up
        self.notes: dict[EngineUrl, EngineNotes] = {}

    async def probe_all(self) -> None:
        """One round over all engines at once."""
        self._engines.advance(time.monotonic())
        await self.probe_these((e.url, role) for role in Role for e in self._engines.snapshots(role))

    async def probe_these(self, engines: Iterable[tuple[EngineUrl, Role]]) -> None:
        """One probe of each of these, all at once."""
        async with asyncio.TaskGroup() as group:
            for url, role in engines:
                group.create_task(self._probe(url, role))

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.probe_all()
            except Exception:  # noqa: BLE001  # a top loop: if it ends, no engine is ever seen to come or go again
                _log.exception("probing failed")

    async def _probe(self, url: EngineUrl, role: Role) -> None:
        why = ""
        try:
            health = await self._client.get(url, "/health", timeout_s=self._timeout_s)
            passed = health.status == 200
            why = f"GET /health answered {health.status}"
            exposition = await self._exposition(url) if passed else None
        except UpstreamFault as fault:
            passed, exposition, why = False, None, str(fault)
        if passed:
            await self._transfer.probe(url, role)
            indexes = None
            if exposition is not None and role is Role.DECODE:
                indexes = parse_index_info(exposition)
            if self._engines.probe_passed(url, role, indexes):
                _log.info("%s engine %s is up", role, url)
                self._came_up(url, time.monotonic())
            if exposition is not None:
                self._take_notes(url, role, exposition)
        elif self._engines.probe_failed(url, role):
            self._transfer.engine_down(url)
            _log.warning("%s engine %s is down: %s", role, url, why)

    def _take_notes(self, url: EngineUrl, role: Role, exposition: str) -> None:
        notes = read_notes(exposition)
        if role is Role.DECODE:
            self.notes[url] = notes
        said = EngineLoad(notes.running or 0, notes.waiting or 0, notes.kv_usage, notes.prefix_caching)
        self._engines.load_said(url, role, said)

    async def _exposition(self, url: EngineUrl) -> str | None:
        """An engine's metrics; None keeps what was known: a slow metrics page says nothing about index or load."""
        try:
            answer = await self._client.get(url, "/metrics", timeout_s=self._timeout_s)
        except UpstreamFault:
            return None
        return answer.body.decode("utf-8", "replace") if answer.status == 200 else None
