"""The table: every system's figures, and whether ours meet the targets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from overhead import figures
from overhead.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overhead.figures import Sample

OURS: Final = "bidikv"
POLLING: Final = "bidikv-poll"
"""Ours as it is set where a turn's latency counts and the router has a core of its own (`busy_poll_s`)."""


def lines(samples: Sequence[Sample]) -> Iterator[str]:
    """Markdown: figures by system, then targets."""
    systems = list(dict.fromkeys(sample.system for sample in samples))
    yield f"| | {' | '.join(systems)} |"
    yield "|---|" + "---|" * len(systems)
    for what, show in _ROWS:
        cells = [show(samples, system) for system in systems]
        if any(cells):
            yield f"| {what} | {' | '.join(cell or '' for cell in cells)} |"
    yield ""
    yield "| target | figure | met |"
    yield "|---|---|---|"
    for what, value, is_met in targets(samples):
        yield f"| {what} | {value:,.2f} | {'yes' if is_met else 'no'} |"


def targets(samples: Sequence[Sample]) -> Iterator[tuple[str, float, bool]]:
    """What our router has to reach, the figure, and whether it does; those that were not measured are left out."""
    for what, value, least, most in _targets(samples):
        if value is not None:
            yield what, value, least <= value <= most


def _targets(samples: Sequence[Sample]) -> Iterator[tuple[str, float | None, float, float]]:
    inf = float("inf")
    for system, how in ((OURS, ""), (POLLING, ", polling")):
        added = [_added(samples, system, "streams", place) for place in (0, 1)]
        yield f"added at 100 streams{how}, p50, at most 1.5 ms", added[0], -inf, 1.5
        yield f"added at 100 streams{how}, p99, at most 6 ms", added[1], -inf, 6.0
    turns, events = figures.turns_per_core, figures.events_per_core
    yield "turns/s per core, at least 800", figures.median(samples, OURS, "turns", turns), 800, inf
    yield "events/s per core, at least 30,000", figures.median(samples, OURS, "events", events), 30_000, inf
    yield "added by a body of 1 MB, at most 15 ms", _added(samples, OURS, "large", 0), -inf, 15.0
    for what, scenario, read in (("turns", "turns", turns), ("events", "events", events)):
        value = figures.ratio(samples, "vllm-router", OURS, scenario, read)
        yield f"vllm-router's {what} per core over ours, at most 3", value, 0, 3.0
        value = figures.ratio(samples, OURS, "litellm", scenario, read)
        yield f"our {what} per core over litellm's, at least 3", value, 3.0, inf


def _added(samples: Sequence[Sample], system: str, scenario: str, place: int) -> float | None:
    return figures.added(samples, system, scenario, lambda sample: sample.first_ms[place])


def _first(scenario: str) -> Callable[[Sequence[Sample], str], str]:
    def show(samples: Sequence[Sample], system: str) -> str:
        if system == "direct":
            values = [
                figures.median(samples, system, scenario, lambda sample, place=place: sample.first_ms[place])
                for place in (0, 1)
            ]
            return _two(values, "")
        return _two([_added(samples, system, scenario, place) for place in (0, 1)], "+")

    return show


def _transit(samples: Sequence[Sample], system: str) -> str:
    if system == "direct":
        read = figures.median
        return _two(
            [
                read(samples, system, "streams", lambda s, place=place: s.transit_ms[place])
                for place in (0, 1)
            ],
            "",
        )
    values = [
        figures.added(samples, system, "streams", lambda sample, place=place: sample.transit_ms[place])
        for place in (0, 1)
    ]
    return _two(values, "+")


def _two(values: list[float | None], sign: str) -> str:
    known = [value for value in values if value is not None]
    return f"{' and '.join(f'{sign}{value:.2f}' for value in known)} ms" if known else ""


def _plain(
    scenario: str, read: Callable[[Sample], float], form: str, *, direct: bool = False
) -> Callable[[Sequence[Sample], str], str]:
    def show(samples: Sequence[Sample], system: str) -> str:
        value = figures.median(samples, system, scenario, read) if direct or system != "direct" else None
        return form.format(value) if value is not None else ""

    return show


_ROWS: Final[tuple[tuple[str, Callable[[Sequence[Sample], str], str]], ...]] = (
    (f"{SCENARIOS['streams'].what}: first event, p50 and p99", _first("streams")),
    ("of each event from engine to client, p50 and p99", _transit),
    (f"{SCENARIOS['awake'].what}: first event, p50 and p99", _first("awake")),
    ("turns/s per core", _plain("turns", figures.turns_per_core, "{:,.0f}")),
    ("processor time per turn", _plain("turns", figures.cpu_ms_per_turn, "{:.2f} ms")),
    ("turns/s as they went", _plain("turns", lambda s: s.turns / s.seconds, "{:,.0f}", direct=True)),
    ("events/s per core", _plain("events", figures.events_per_core, "{:,.0f}")),
    ("events/s as they went", _plain("events", lambda s: s.events / s.seconds, "{:,.0f}", direct=True)),
    ("events in one read", _plain("events", lambda s: s.events / max(1, s.reads), "{:.2f}", direct=True)),
    (f"{SCENARIOS['large'].what}: first event, p50 and p99", _first("large")),
    ("processor time per such turn", _plain("large", figures.cpu_ms_per_turn, "{:.1f} ms")),
    ("memory", _plain("turns", lambda sample: sample.memory_mib, "{:.0f} MiB")),
    ("load generator, share of a core, turns", _plain("turns", lambda s: s.load_cpu, "{:.2f}", direct=True)),
    ("both engines, share of a core, turns", _plain("turns", lambda s: s.engines_cpu, "{:.2f}", direct=True)),
)
