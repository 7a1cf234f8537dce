"""What a router costs: a client beside itself, bidikv's router, vllm-router and LiteLLM's proxy, over the same fake engines.

    python benchmarks/router/compare.py [--only LOAD ...] [--without SYSTEM ...] [--repetitions N] [--json FILE]

Loads:

    streams    100 streams at 50 events a second each: what a router adds to the first event, and to every other one
    awake      the same, while no core of the machine is let go idle (Linux): what is added without the machine's own waking up
    turns      turns that are not streamed, as many as go: turns per second of the router's processor time
    events     600 streams at 50 events a second, 500 events long: events per second of the router's processor time
    large      one client with a body of 1 MB: what a router adds to it

Without a router ("direct") the client sends both legs itself, as a router would. LiteLLM knows no prefill: it sends one
leg where the others send two. "bidikv-poll" is bidikv with `busy_poll_s = 0.002`. vllm-router and LiteLLM are installed into
virtual environments of their own the first time.
Everything shares this machine: compare within one run, and read "per core" as per second of processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from overhead.report import lines, targets
from overhead.run import Bench, LoadFailedError, SystemFailedError, measure
from overhead.scenarios import SCENARIOS
from overhead.systems import NAMES

_VENVS = Path(tempfile.gettempdir()) / "bidikv-benchmark-venvs"


def main() -> int:
    """Measure, print the tables, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(SCENARIOS), metavar="LOAD", help="leave the others out"
    )
    parser.add_argument(
        "--without", nargs="+", choices=NAMES[1:], default=[], metavar="SYSTEM", help="leave it out"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each sample, after the warm-up (default: 3)"
    )
    parser.add_argument(
        "--venvs", type=Path, default=_VENVS, help=f"where to install others (default: {_VENVS})"
    )
    parser.add_argument("--json", type=Path, help="write every sample here")
    arguments = parser.parse_args()
    if arguments.repetitions < 1 or arguments.seconds <= 0:
        parser.error("--repetitions and --seconds have to be positive")
    started_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started_s:5.0f} s  {line}", file=sys.stderr, flush=True)

    systems = [name for name in NAMES if name not in arguments.without]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Bench(Path(folder), arguments.venvs) as bench:
                samples = measure(
                    bench,
                    systems,
                    arguments.only or list(SCENARIOS),
                    repetitions=arguments.repetitions,
                    seconds=arguments.seconds,
                    say=say,
                )
        except (LoadFailedError, SystemFailedError) as error:
            print(error, file=sys.stderr)
            return 2
    for line in lines(samples):
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(sample) for sample in samples], indent=1))
        say(f"every sample: {arguments.json}")
    return 0 if all(is_met for _, _, is_met in targets(samples)) else 1


if __name__ == "__main__":
    sys.exit(main())
