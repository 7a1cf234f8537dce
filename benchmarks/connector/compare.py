"""BidiNixlConnector beside vLLM's stock NixlConnector: same model, same engine flags, same turns, in one run.

    python benchmarks/connector/compare.py [--only PART ...] [--repetitions N] [--json FILE]

Real engines, real NIXL, a real model (SmolLM2-135M; a tiny random one for `overhead` and `lookup`). Parts:

    idle        processor time and blocks that an idle decode engine pays for what it retains
    answers     answers to histories that changed, token for token against cold runs, and plain requests after them
    streaming   streamed warm turns whose prefill read anything from decode
    pressure    short conversations that need more blocks than decode has
    throughput  decode's speed with its pool full of retained blocks and with retention off, in one process (ours only)
    overhead    the same with a tiny model, where the engine's own work is all there is (ours only)
    lookup      lookup and verification inside engines, up to 8,192 blocks (ours only)

Exit code 1 if one of our answers was wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bidikv_server.launch.errors import LaunchError
from comparison.calls import CallFailedError
from comparison.report import lines
from comparison.run import PARTS, Comparison

INTERRUPTED = 130


def main() -> int:
    """Run, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="leave the other parts out")
    parser.add_argument(
        "--repetitions", type=int, default=3, help="ABBA runs of `throughput` and `overhead` (default: 3)"
    )
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="window of `idle` (default: 20)")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    if arguments.repetitions < 1 or arguments.idle_seconds <= 0:
        parser.error("--repetitions and --idle-seconds have to be positive")
    started_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started_s:5.0f} s  {line}", file=sys.stderr, flush=True)

    try:
        parts = frozenset(arguments.only or PARTS)
        result = Comparison(parts, arguments.repetitions, arguments.idle_seconds, say).run()
    except KeyboardInterrupt:
        say("interrupted: every engine was ended")
        return INTERRUPTED
    except (LaunchError, CallFailedError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in lines(result):
        print(line)
    if arguments.json is not None:
        result.write(arguments.json)
        say(f"everything: {arguments.json}")
    return 0 if result.right() else 1


if __name__ == "__main__":
    sys.exit(main())
