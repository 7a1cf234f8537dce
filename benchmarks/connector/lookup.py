"""What a lookup costs: digests, the question and its answer over a real socket, and the validation after the read.

    python benchmarks/connector/lookup.py [--json FILE]

No engine. Blocks of 16 tokens, vLLM's default on a GPU. Prints medians over the repetitions, in milliseconds: `first` is the
digests of a prompt that nothing is known of, `next` those of a conversation's next turn, which repeats all but the last
256 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bidikv_server.connector import messages
from bidikv_server.connector.core import digests
from bidikv_server.connector.index_service import IndexService
from bidikv_server.connector.side_channel import Client, Server

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16
SIZES_TOKENS = (1024, 32768, 131072)
NEW_TOKENS = 256
CONNECTION = {"engine_id": "e", "host": "127.0.0.1", "port": 1, "tp_size": 1, "dcp_size": 1, "pp_size": 1}


def measure(tokens: int, repetitions: int) -> dict[str, float]:
    """Medians of one prompt size, in milliseconds."""
    blocks = tokens // BLOCK_SIZE
    rng = random.Random(tokens)  # noqa: S311
    prompt = [rng.randrange(150_000) for _ in range(tokens)]
    start = digests.seed("identity", "salt")
    chain = digests.chain(start, prompt, block_size=BLOCK_SIZE, blocks=blocks)
    index = IndexService("identity", CONNECTION, blocks + 1)
    known = digests.chain(
        start, prompt, block_size=BLOCK_SIZE, blocks=max(1, blocks - NEW_TOKENS // BLOCK_SIZE)
    )
    index.retain("conversation", chain, range(blocks), ttl_s=480.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    server, client = Server(address, index.answer, secret="secret"), Client(secret="secret")  # noqa: S106

    def ask(message: messages.Message) -> messages.Message | None:
        future = client.submit(address, messages.encode(message), timeout_s=10)
        return messages.decode(future.result())

    def look_up() -> messages.Found:
        found = ask(messages.Lookup(messages.VERSION, "identity", "conversation", b"".join(chain.digests)))
        assert isinstance(found, messages.Found)  # noqa: S101
        assert len(found.block_ids) == blocks  # noqa: S101
        return found

    found = look_up()
    check = messages.Validate(messages.VERSION, found.epoch, found.block_ids, found.generations)
    try:
        times = {
            "first": timed(
                lambda: digests.chain(start, prompt, block_size=BLOCK_SIZE, blocks=blocks), repetitions
            ),
            "next": timed(
                lambda: digests.chain(start, prompt, block_size=BLOCK_SIZE, blocks=blocks, known=known),
                repetitions,
            ),
            "lookup": timed(look_up, repetitions),
            "validation": timed(lambda: ask(check), repetitions),
        }
    finally:
        client.close()
        server.close()
    asked = times["lookup"] + times["validation"]
    return {**times, "first turn": times["first"] + asked, "next turn": times["next"] + asked}


def timed(work: Callable[[], object], repetitions: int) -> float:
    """Median of `work`, in milliseconds."""
    samples = []
    for _ in range(repetitions):
        started_s = time.perf_counter()
        work()
        samples.append((time.perf_counter() - started_s) * 1000)
    return statistics.median(samples)


def main() -> int:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    results = {tokens: measure(tokens, arguments.repetitions) for tokens in SIZES_TOKENS}
    columns = list(next(iter(results.values())))
    print(f"{'tokens':>8} {'blocks':>7} " + " ".join(f"{name:>11}" for name in columns) + "   (ms, medians)")
    for tokens, row in results.items():
        print(f"{tokens:>8} {tokens // BLOCK_SIZE:>7} " + " ".join(f"{row[name]:11.2f}" for name in columns))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
