"""What the router's memory costs: bytes a conversation, and the time of a lookup with its commit, by how many are known.

    python benchmarks/router/table.py [--turns 4] [--sizes 10000,100000,1000000] [--json FILE]

Every size runs in a process of its own. Bytes are the growth of its resident memory, for the conversation table and
for the history behind the admin API. Conversations grow turn by turn, all of them in turn, each prompt two messages longer.
Timed are next turns of random conversations, which find their place and are committed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from bidikv_server.reasons import Reason
from bidikv_server.router.core.conversations import ConversationTable, Holder
from bidikv_server.router.core.digests import Chain, Digest
from bidikv_server.router.core.engines import IndexInfo
from bidikv_server.router.core.history import History, TurnRecord
from bidikv_server.router.core.ids import EngineUrl, Scope, session_key
from bidikv_server.router.core.policy import Placement

TIMED = 20_000
HOLDERS = [
    Holder(
        EngineUrl(f"http://10.0.0.{number}:8200"), (IndexInfo(f"engine-{number}", f"10.0.0.{number}:7000"),)
    )
    for number in range(8)
]


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(conversation: int, turn: int) -> Chain:
    """The digests of a conversation's prompt: random bytes as far as anybody can tell."""
    digests = tuple(
        Digest(hashlib.blake2b(f"{conversation},{message}".encode(), digest_size=16).digest())
        for message in range(2 * turn + 1)
    )
    return Chain(digests, digests[-1])


def scope_of(conversation: int) -> Scope:
    """One of a hundred tenants, and a name that is an object of its own, as one out of a request is."""
    return Scope(f"tenant-{conversation % 100}", f"model-{conversation % 1}")


class Memory:
    """Both halves, and what each one took."""

    def __init__(self, conversations: int) -> None:
        self.table = ConversationTable(max_conversations=conversations, max_turns=64, idle_s=1e9)
        self.history = History(max_conversations=conversations, max_records=16, idle_s=1e9)
        self.now_s = 0.0

    def turn(self, conversation: int, turn: int) -> None:
        """Find a turn's place and commit it."""
        self.now_s += 1e-5
        scope = scope_of(conversation)
        match = self.table.find(scope, f"session-{conversation}", prompt(conversation, turn), self.now_s)
        self.table.commit(match, HOLDERS[conversation % 8], self.now_s)

    def record(self, conversation: int, turn: int) -> None:
        """Record what became of a turn."""
        self.now_s += 1e-5
        scope = scope_of(conversation)
        key, engine = session_key(scope, f"session-{conversation}"), HOLDERS[conversation % 8].engine
        self.history.record(key, scope, record(turn.to_bytes(16, "big"), engine, self.now_s))

    def timed(self, conversation: int, turn: int) -> float:
        """The same turn, timed; in seconds."""
        chain, scope, session = prompt(conversation, turn), scope_of(conversation), f"session-{conversation}"
        self.now_s += 1e-5
        began_s = time.perf_counter()
        match = self.table.find(scope, session, chain, self.now_s)
        self.table.commit(match, HOLDERS[0], self.now_s)
        return time.perf_counter() - began_s


def record(turn: bytes, engine: EngineUrl, at_s: float) -> TurnRecord:
    """What becomes of a turn that hits."""
    return TurnRecord(turn, Reason.HIT, Placement.HOME, 4409, 4288, 0, 121, None, engine, engine, 0.2, at_s)


def measure(conversations: int, turns: int) -> dict[str, float]:
    """Fill both halves one after the other, then time turns."""
    memory = Memory(conversations)
    marks = [resident_bytes()]
    for step in (memory.turn, memory.record):
        for turn in range(turns):
            for conversation in range(conversations):
                step(conversation, turn)
        gc.collect()
        marks.append(resident_bytes())
    chance = random.Random(0)  # noqa: S311
    times = sorted(memory.timed(chance.randrange(conversations), turns) for _ in range(TIMED))
    return {
        "conversations": conversations,
        "turns": turns,
        "table_bytes": (marks[1] - marks[0]) / conversations,
        "history_bytes": (marks[2] - marks[1]) / conversations,
        "p50_us": times[TIMED // 2] * 1e6,
        "p99_us": times[TIMED * 99 // 100] * 1e6,
    }


def main() -> None:
    """Measure every size in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=4, help="turns of every conversation (default: 4)")
    parser.add_argument("--sizes", default="10000,100000,1000000", help="conversations, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.turns)))
        return
    rows = []
    print("conversations  turns  table  history      sum  find and commit: p50      p99")
    for size in options.sizes.split(","):
        command = [sys.executable, __file__, "--one", size, "--turns", str(options.turns)]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        rows.append(row)
        both = row["table_bytes"] + row["history_bytes"]
        print(
            f"{row['conversations']:13,}  {row['turns']:5}  {row['table_bytes']:4.0f} B  {row['history_bytes']:5.0f} B"
            f"  {both:5.0f} B  {row['p50_us']:17.1f} us  {row['p99_us']:4.1f} us",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
