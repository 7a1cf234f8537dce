"""What the samples say: medians over repetitions, and differences and ratios within each of them. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Sample:
    """One system under one load, once.

    Attributes:
        system: Which.
        scenario: Which load.
        repetition: Which round; samples of one round were taken side by side.
        seconds: How long was counted.
        turns: That ended then.
        events: That arrived then.
        reads: Reads that the events took.
        cpu_s: Processor time of the router, its children included; 0 for the direct way.
        memory_mib: What the router held at the end.
        load_cpu: Share of a core that the load generator took.
        engines_cpu: The same of both engines together.
        first_ms: From a turn's beginning to the first byte of its answer: median, and 99th percentile.
        transit_ms: From an event's writing to its arrival, likewise.
    """

    system: str
    scenario: str
    repetition: int
    seconds: float
    turns: int
    events: int
    reads: int
    cpu_s: float
    memory_mib: float
    load_cpu: float
    engines_cpu: float
    first_ms: tuple[float, float]
    transit_ms: tuple[float, float]


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; not a number without values."""
    if not values:
        return float("nan"), float("nan")
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def of(samples: Iterable[Sample], system: str, scenario: str) -> list[Sample]:
    """The samples of one system under one load, by repetition."""
    found = (sample for sample in samples if (sample.system, sample.scenario) == (system, scenario))
    return sorted(found, key=lambda sample: sample.repetition)


def median(
    samples: Iterable[Sample], system: str, scenario: str, read: Callable[[Sample], float]
) -> float | None:
    """Median of a figure over the repetitions; None without samples."""
    values = [read(sample) for sample in of(samples, system, scenario)]
    return statistics.median(values) if values else None


def added(
    samples: Sequence[Sample], system: str, scenario: str, read: Callable[[Sample], float]
) -> float | None:
    """Median of what a system adds to the direct way, each repetition for itself; None without samples of both."""
    return _paired(samples, system, "direct", scenario, lambda ours, theirs: read(ours) - read(theirs))


def ratio(
    samples: Sequence[Sample], system: str, other: str, scenario: str, read: Callable[[Sample], float]
) -> float | None:
    """Median of how many times the other's figure a system's is, each repetition for itself."""
    return _paired(samples, system, other, scenario, lambda ours, theirs: read(ours) / read(theirs))


def _paired(
    samples: Sequence[Sample],
    system: str,
    other: str,
    scenario: str,
    compare: Callable[[Sample, Sample], float],
) -> float | None:
    others = {sample.repetition: sample for sample in of(samples, other, scenario)}
    values = [
        compare(sample, others[sample.repetition])
        for sample in of(samples, system, scenario)
        if sample.repetition in others
    ]
    return statistics.median(values) if values else None


def turns_per_core(sample: Sample) -> float:
    """Turns for each second of the router's processor time."""
    return sample.turns / sample.cpu_s


def events_per_core(sample: Sample) -> float:
    """Events for each second of the router's processor time."""
    return sample.events / sample.cpu_s


def cpu_ms_per_turn(sample: Sample) -> float:
    """Processor time of the router for each turn."""
    return 1000 * sample.cpu_s / sample.turns
