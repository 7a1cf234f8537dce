"""The load: so many clients that play conversations, in a process of its own.

Clients are coroutines on uvloop over raw protocols; everything they send was written before. On standard output come the
lines `begin` and `end` around what is measured, so that whoever started this can read the processor times of the
systems then, and the figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import sys
import time
from typing import Any, Final

import psutil
import uvloop

from overhead.client import Connection, Sight
from overhead.scenarios import SCENARIOS, Scenario
from overhead.traffic import Turn, conversation, large_conversation

LARGE_TURNS: Final = 12
_GOLDEN: Final = 0.6180339887
"""Spreads the clients' beginnings evenly and in no step with the pace of their streams, whose events would come in bursts."""
_CONVERSATIONS: Final = 4
"""Written for each client; then they repeat under the same names, as retries and forks do."""


class Client:
    """One client: it plays turn after turn, through a router or as both legs itself."""

    def __init__(self, ports: list[int], sight: Sight) -> None:
        self._connections = [Connection(port, sight) for port in ports]
        self._sight = sight

    async def play(self, turn: Turn) -> None:
        """One turn."""
        started_ns = time.monotonic_ns()
        if len(self._connections) == 1:
            await self._connections[0].send(turn.routed, started_ns)
        else:
            prefill, decode = self._connections
            await prefill.send(turn.legs[0], None)
            await decode.send(turn.legs[1], started_ns)
        self._sight.turns += self._sight.counting

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()


def written(scenario: Scenario, client: int, salt: int) -> list[Turn]:
    """Everything that one client will send."""
    if scenario.body_bytes:
        return large_conversation(salt, body_bytes=scenario.body_bytes, turns=LARGE_TURNS)
    conversations = [
        conversation(
            client,
            salt * _CONVERSATIONS + number,
            stream=scenario.pace_s > 0,
            max_tokens=scenario.events,
        )
        for number in range(_CONVERSATIONS)
    ]
    return list(itertools.chain.from_iterable(conversations))


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Warm up, measure, and tell."""
    sight, scenario = Sight(), SCENARIOS[arguments.scenario]
    scripts = [written(scenario, number, arguments.salt) for number in range(arguments.clients)]
    # What was written is no garbage, and looking for some would be seen as latency.
    gc.collect()
    gc.freeze()

    async def play(number: int, turns: list[Turn]) -> None:
        client = Client(arguments.ports, sight)
        await asyncio.sleep(scenario.spread_s * (number * _GOLDEN % 1.0))
        try:
            for turn in itertools.cycle(turns):
                await client.play(turn)
        finally:
            client.close()

    playing = [asyncio.ensure_future(play(number, turns)) for number, turns in enumerate(scripts)]
    ended = asyncio.gather(*playing)
    await _sleep_unless(ended, arguments.warm_up_s)
    sight.counting, own = True, psutil.Process()
    print("begin", flush=True)
    started_s, cpu_before_s = time.monotonic(), sum(own.cpu_times()[:2])
    await _sleep_unless(ended, arguments.seconds)
    sight.counting = False
    seconds, cpu_s = time.monotonic() - started_s, sum(own.cpu_times()[:2]) - cpu_before_s
    print("end", flush=True)
    for task in playing:
        task.cancel()
    await asyncio.gather(ended, *playing, return_exceptions=True)
    return {
        "seconds": seconds,
        "turns": sight.turns,
        "events": len(sight.transit_ns),
        "reads": sight.reads,
        "request_bytes": max(len(turn.routed) for turns in scripts for turn in turns),
        "load_cpu_share": cpu_s / seconds,
        "first_ms": [ns / 1e6 for ns in sight.first_ns],
        "transit_ms": [ns / 1e6 for ns in sight.transit_ns],
    }


async def _sleep_unless(ended: asyncio.Future[Any], seconds: float) -> None:
    """Wait, or raise what went wrong meanwhile."""
    await asyncio.wait((ended,), timeout=seconds)
    if ended.done():
        ended.result()


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=tuple(SCENARIOS), required=True)
    parser.add_argument(
        "--ports", type=int, nargs="+", required=True, help="a router's, or prefill's and decode's"
    )
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--warm-up-s", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--salt", type=int, default=0, help="makes the conversations of two runs differ")
    json.dump(uvloop.run(run(parser.parse_args())), sys.stdout)


if __name__ == "__main__":
    main()
