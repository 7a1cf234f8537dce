"""Where a turn is decoded: policies to choose from, each a pure function of a `DecodeView`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.choices import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bidikv_server.router.core.choices import DecodeView
    from bidikv_server.router.core.engines import EngineSnapshot
    from bidikv_server.router.core.ids import EngineUrl

_QUEUED_RATIO: Final = 1.25
"""How much busier a home whose requests wait must be than another engine whose do not."""
_FULL: Final = 0.9
"""Share of KV blocks in use from which an engine is pressed, and no refuge."""
_ROOMY: Final = 0.75
"""What an engine is below that such a one's turns go to. It has some way to go until it is full itself."""


@dataclass(frozen=True, slots=True)
class Sticky:
    """A conversation stays on its engine, unless that is much busier than another one.

    It moves when its engine has more than `ratio` times the load of the calmest one and `margin` requests on top, or when
    requests wait there, none waits at the calmest one, and that has a quarter less to do; or when its engine's KV blocks
    are all but taken while another one has room and is not much busier. Once moved it lives there, and the same rule seen
    from the other side keeps it: loads between which both engines would give turns to each other do not exist.

    Attributes:
        ratio: At least 1.
        margin: In requests.
    """

    ratio: float = 2.0
    margin: int = 16

    def __call__(self, view: DecodeView) -> tuple[EngineSnapshot, Placement]:
        """The home, or the calmest engine."""
        calmest = least_loaded(view.candidates, prefer=view.origin)
        home = _find(view.candidates, view.home)
        if home is None:
            return calmest, view.absent or Placement.LEAST_LOADED
        if self._presses(home, calmest):
            return calmest, Placement.PRESSURE
        if (refuge := self._refuge(home, view)) is not None:
            return refuge, Placement.PRESSURE
        return home, Placement.HOME

    def _refuge(self, home: EngineSnapshot, view: DecodeView) -> EngineSnapshot | None:
        """Where a turn goes whose blocks its home would have to take from others; None if it need not, or cannot."""
        if home.kv_usage is None or home.kv_usage < _FULL:
            return None
        roomy = [
            engine for engine in view.candidates if _has_room(engine) and not self._presses(engine, home)
        ]
        return least_loaded(roomy, prefer=view.origin) if roomy else None

    def _presses(self, home: EngineSnapshot, calmest: EngineSnapshot) -> bool:
        if home.load > self.ratio * calmest.load + self.margin:
            return True
        queued = home.waiting > 0 and calmest.waiting == 0 and (calmest.kv_usage or 0.0) < _FULL
        return queued and home.load > _QUEUED_RATIO * calmest.load


def pinned(view: DecodeView) -> tuple[EngineSnapshot, Placement]:
    """A conversation stays on its engine, however busy that is."""
    home = _find(view.candidates, view.home)
    if home is not None:
        return home, Placement.HOME
    return least_loaded(view.candidates, prefer=view.origin), view.absent or Placement.LEAST_LOADED


def spread(view: DecodeView) -> tuple[EngineSnapshot, Placement]:
    """Every turn goes to the engine with least to do, and reads back from wherever its conversation was."""
    chosen = least_loaded(view.candidates, prefer=view.home or view.origin)
    return chosen, Placement.HOME if chosen.url == view.home else Placement.LEAST_LOADED


def least_loaded(engines: Iterable[EngineSnapshot], prefer: EngineUrl | None = None) -> EngineSnapshot:
    """Least to do; ties go to the preferred one, then to the first configured.

    A fork only prefers its origin's engine among equals: it can read back from there anyway, and a popular origin would
    otherwise gather every fork on one engine.
    """
    return min(engines, key=lambda engine: (engine.load, engine.url != prefer))


def _has_room(engine: EngineSnapshot) -> bool:
    return engine.waiting == 0 and engine.kv_usage is not None and engine.kv_usage < _ROOMY


def _find(engines: Iterable[EngineSnapshot], url: EngineUrl | None) -> EngineSnapshot | None:
    return next((engine for engine in engines if engine.url == url), None)
