"""The measurement: every load on every system in turn, round after round."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from overhead.awake import cores_awake
from overhead.figures import Sample, quantiles
from overhead.scenarios import SCENARIOS
from overhead.systems import Bench, System, SystemFailedError, set_pace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psutil

WARM_UP_S: Final = 1.5
_SLOW: Final = {("litellm", "events"): 60, ("litellm", "streams"): 100}
"""Clients of a system that would need minutes to get through so many streams; per core nothing changes."""


class LoadFailedError(RuntimeError):
    """A load could not be played; the message has the reason."""


def measure(
    bench: Bench,
    systems: Sequence[str],
    scenarios: Sequence[str],
    *,
    repetitions: int,
    seconds: float,
    say: Callable[[str], None],
) -> list[Sample]:
    """Start the systems, and take a sample of each under each load in each round, in another order every time.

    Raises:
        SystemFailedError: A system cannot be started.
        LoadFailedError: A system gives wrong answers.
    """
    started = [bench.start(name) for name in systems]
    samples = []
    for repetition in range(repetitions):
        turned = started[repetition % len(started) :] + started[: repetition % len(started)]
        order = turned if repetition % 2 == 0 else turned[::-1]
        for scenario in scenarios:
            with cores_awake() if SCENARIOS[scenario].awake else contextlib.nullcontext():
                for system in order:
                    say(f"round {repetition + 1}: {scenario}, {system.name}")
                    samples.append(_sample(bench, system, scenario, repetition, seconds))
    return samples


def _sample(bench: Bench, system: System, name: str, repetition: int, seconds: float) -> Sample:
    scenario = SCENARIOS[name]
    for port in bench.engines:
        set_pace(port, scenario.pace_s)
    command = [sys.executable, "-m", "overhead.load", "--scenario", name, "--ports", *map(str, system.ports)]
    command += ["--clients", str(_SLOW.get((system.name, name), scenario.clients)), "--salt", str(repetition)]
    command += ["--warm-up-s", str(WARM_UP_S + scenario.spread_s), "--seconds", str(seconds)]
    folder = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as load:
        assert load.stdout is not None  # noqa: S101  # PIPE
        assert load.stderr is not None  # noqa: S101  # PIPE
        _expect(load, "begin")
        before = system.cpu_s(), _cpu_s(bench.engine_processes)
        _expect(load, "end")
        after, memory = (system.cpu_s(), _cpu_s(bench.engine_processes)), system.memory_mib()
        told: dict[str, Any] = json.loads(load.stdout.read())
    if not (told["turns"] or told["events"]):
        raise LoadFailedError(
            f"{system.name} answered nothing of {name} in time: measure with more --seconds"
        )
    return Sample(
        system=system.name,
        scenario=name,
        repetition=repetition,
        seconds=told["seconds"],
        turns=told["turns"],
        events=told["events"],
        reads=told["reads"],
        cpu_s=after[0] - before[0],
        memory_mib=memory,
        load_cpu=told["load_cpu_share"],
        engines_cpu=(after[1] - before[1]) / told["seconds"],
        first_ms=quantiles(told["first_ms"]),
        transit_ms=quantiles(told["transit_ms"]),
    )


def _expect(load: subprocess.Popen[str], line: str) -> None:
    assert load.stdout is not None  # noqa: S101  # PIPE
    assert load.stderr is not None  # noqa: S101  # PIPE
    if load.stdout.readline() != f"{line}\n":
        said = load.stderr.read().strip().splitlines() or ["nothing"]
        raise LoadFailedError(f"the load ended early: {said[-1]}")


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


__all__ = ["Bench", "LoadFailedError", "SystemFailedError", "measure"]
