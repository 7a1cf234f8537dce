"""What sharing costs: the time of a lookup and of a commit on a real server, one by one and many at once, and its memory.

    python benchmarks/router/state.py [--conversations 2000] [--turns 4] [--at-once 100] [--json FILE]

Starts a Redis or Valkey server (one must be on PATH) on loopback. `memory` is the router's own, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from prometheus_client import CollectorRegistry

from bidikv_server.router.core.conversations import ConversationTable
from bidikv_server.router.core.history import History
from bidikv_server.router.settings import RouterSettings
from bidikv_server.router.state.create import create_store
from bidikv_server.router.state.store import Clock, StateStore
from table import HOLDERS, prompt, record, scope_of


def make_store(url: str | None) -> StateStore:
    """A router's store with its defaults: shared at a URL, in memory without one."""
    settings = RouterSettings(prefill=("http://p",), decode=("http://d",), state_url=url, state_timeout_s=5.0)
    bounds: dict[str, Any] = {
        "max_conversations": settings.max_conversations,
        "idle_s": settings.conversation_idle_s,
    }
    table = ConversationTable(max_turns=settings.max_turns, **bounds)
    history = History(max_records=settings.max_records, **bounds)
    return create_store(settings, table, history, Clock(), CollectorRegistry())


async def turn(store: StateStore, conversation: int, number: int, times: dict[str, list[float]]) -> None:
    """One turn, as the router has it find and commit."""
    chain, scope = prompt(conversation, number), scope_of(conversation)
    began_s = time.perf_counter()
    match = await store.find(scope, f"session-{conversation}", chain)
    found_s = time.perf_counter()
    if number and (match.own is None or match.own.depth != 2 * number - 1):
        raise SystemExit(f"turn {number} of conversation {conversation} did not find the one before")
    holder = HOLDERS[conversation % 8]
    await store.commit(match, scope, record(match.digest or b"", holder.engine, 0.0), holder)
    times["find"].append(found_s - began_s)
    times["commit"].append(time.perf_counter() - found_s)


async def play(url: str | None, conversations: int, turns: int, at_once: int) -> dict[str, float]:
    """All conversations turn by turn, so many turns at once; throughput and latencies."""
    store = make_store(url)
    await store.open()
    times: dict[str, list[float]] = {"find": [], "commit": []}
    began_s = time.perf_counter()
    for number in range(turns):
        waiting = iter(range(conversations))

        async def worker(number: int = number, waiting: Any = waiting) -> None:
            for conversation in waiting:
                await turn(store, conversation, number, times)

        await asyncio.gather(*(worker() for _ in range(at_once)))
    took_s = time.perf_counter() - began_s
    await store.close()
    figures = {"turns_per_s": conversations * turns / took_s}
    for name, measured in times.items():
        measured.sort()
        figures |= {
            f"{name}_p50_ms": measured[len(measured) // 2] * 1e3,
            f"{name}_p99_ms": measured[len(measured) * 99 // 100] * 1e3,
        }
    return figures


def start(program: str, folder: str) -> tuple[subprocess.Popen[bytes], redis.Redis]:
    """A server on a free port, and a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=port, protocol=2)
    for _ in range(200):
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.02)
        else:
            return process, client
    process.kill()
    raise SystemExit(f"{program} does not answer")


def main() -> None:
    """Play on memory and on a server, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4, help="turns of every conversation (default: 4)")
    parser.add_argument(
        "--at-once", type=int, default=100, help="turns at once in the second row (default: 100)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        sys.exit("no redis-server or valkey-server on PATH: run scripts/services.sh redis")
    rows = []
    print(
        "state   at once  turns/s   find: p50      p99   commit: p50      p99   server's memory a conversation"
    )
    with tempfile.TemporaryDirectory() as folder:
        process, client = start(program, folder)
        url = f"redis://127.0.0.1:{client.get_connection_kwargs()['port']}"
        try:
            for name, at, at_once in (
                ("memory", None, 1), ("shared", url, 1), ("shared", url, options.at_once)
            ):  # fmt: skip
                client.flushall()
                before = client.info("memory")["used_memory"]
                row: dict[str, Any] = asyncio.run(play(at, options.conversations, options.turns, at_once))
                used = (client.info("memory")["used_memory"] - before) / options.conversations
                rows.append({"state": name, "at_once": at_once, "server_bytes": used, **row})
                print(
                    f"{name:6}  {at_once:7}  {row['turns_per_s']:7.0f}  {row['find_p50_ms']:7.3f} ms"
                    f"  {row['find_p99_ms']:5.2f} ms  {row['commit_p50_ms']:8.3f} ms  {row['commit_p99_ms']:5.2f} ms"
                    f"   {used if at else 0:7.0f} B",
                    flush=True,
                )
        finally:
            process.kill()
            process.wait()
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
