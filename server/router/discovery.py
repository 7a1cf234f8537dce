"""Keeps the table of engines at what the settings, a file and DNS say, while the router runs."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.discovery import Roster
from bidikv_server.router.core.engines import Role
from bidikv_server.router.engines_file import EnginesFile
from bidikv_server.router.resolver import LookupFailed, Resolver

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv_server.router.core.discovery import Listed, Lookup
    from bidikv_server.router.core.engines import EngineTable
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.probes import Prober
    from bidikv_server.router.settings import RouterSettings

_log = logging.getLogger(__name__)
_TICK_S: Final = 1.0
"""Between two looks at the file, at which names are due, and at which leaving engines are gone."""


class Discovery:
    """Adds engines to the table and takes them off it. One event loop only."""

    def __init__(
        self,
        settings: RouterSettings,
        engines: EngineTable,
        prober: Prober,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """List what is known without asking anybody: the settings' engines and the file's.

        Raises:
            SettingsError: The file cannot be used.
        """
        self._engines = engines
        self._prober = prober
        self._clock = clock
        self._interval_s = settings.dns_interval_s
        self._resolver = Resolver(settings.name_server())
        self._roster = Roster(settings.engine_list())
        self._file = EnginesFile(settings.engines_file) if settings.engines_file is not None else None
        if self._file is not None:
            self._roster.file_says(self._file.listed)
        self._asked_s: dict[Lookup, float] = {}
        self._failing: set[Lookup] = set()
        self._listed: tuple[Listed, ...] = ()
        self._apply()

    async def look(self) -> None:
        """Bring the table up to date once: file, names that are due, leaving engines. Probes what is new."""
        if self._file is not None and self._file.read_again():
            self._roster.file_says(self._file.listed)
        lookups = self._roster.lookups()
        self._asked_s = {lookup: at_s for lookup, at_s in self._asked_s.items() if lookup in lookups}
        self._failing &= set(lookups)
        await asyncio.gather(*(self._look_up(lookup) for lookup in lookups if self._is_due(lookup)))
        added = self._apply()
        for url, role in self._engines.sweep(self._clock()):
            _log.info("%s engine %s is forgotten", role, url)
        await self._prober.probe_these(added)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.look()
            except Exception:  # noqa: BLE001  # a top loop: if it ends, engines come and go unseen
                _log.exception("discovery failed")

    def _is_due(self, lookup: Lookup) -> bool:
        asked_s = self._asked_s.get(lookup)
        return asked_s is None or self._clock() - asked_s >= self._interval_s

    async def _look_up(self, lookup: Lookup) -> None:
        self._asked_s[lookup] = self._clock()
        try:
            found = await self._resolver.find(lookup)
        except LookupFailed as failed:
            if lookup not in self._failing:
                _log.warning("%s cannot be looked up, its engines stay: %s", lookup, failed)
            self._failing.add(lookup)
            return
        kept = self._roster.dns_says(lookup, found, self._answering())
        if found and lookup in self._failing:
            _log.info("%s can be looked up again", lookup)
        elif not found and lookup not in self._failing:
            stay = f"; {len(kept)} that still answer stay" if kept else ""
            _log.warning("%s names no engine%s", lookup, stay)
        self._failing = self._failing - {lookup} if found else self._failing | {lookup}

    def _answering(self) -> set[EngineUrl]:
        return {engine.url for role in Role for engine in self._engines.snapshots(role) if engine.healthy}

    def _apply(self) -> list[Listed]:
        """Bring the table's list to what is wanted; returns what is new on it."""
        wanted, before = self._roster.wanted(), set(self._listed)
        added = [listed for listed in wanted if listed not in before and self._engines.add(*listed)]
        removed = [listed for listed in before.difference(wanted) if self._engines.remove(*listed)]
        self._listed = wanted
        for url, role in added:
            _log.info("%s engine %s is listed", role, url)
        for url, role in sorted(removed):
            _log.info("%s engine %s is no longer listed: it takes no new legs", role, url)
        return added
