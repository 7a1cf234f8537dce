"""Which hash should name a block: chains of 16-token blocks in each candidate, and the chain as the connector makes it.

    python benchmarks/connector/hashing.py [--tokens N] [--repetitions N]

`blake3` and `xxhash` are measured where they are installed (neither is needed by bidikv). xxhash is here for its speed only: it
is no cryptographic hash, so a client could make two prompts with one name. Medians in milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING

from bidikv_server.connector.core import digests

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16
NEW_TOKENS = 256


def candidates() -> dict[str, Callable[[bytes], bytes]]:
    """One-shot hashes by name."""
    found: dict[str, Callable[[bytes], bytes]] = {
        "sha256": lambda data: hashlib.sha256(data).digest(),
        "blake2b": lambda data: hashlib.blake2b(data, digest_size=32).digest(),
    }
    for module, name in (("blake3", "blake3"), ("xxhash", "xxh3_128")):
        try:
            one_shot = getattr(importlib.import_module(module), name)
        except ImportError:
            print(f"{module} is not installed", file=sys.stderr)
            continue
        found[name] = lambda data, one_shot=one_shot: one_shot(data).digest()
    return found


def chain(one_shot: Callable[[bytes], bytes], packed: bytes) -> bytes:
    """The last digest of a chain over packed tokens."""
    step = BLOCK_SIZE * digests.TOKEN_BYTES
    current = b""
    for offset in range(0, len(packed), step):
        current = one_shot(current + packed[offset : offset + step])
    return current


def main() -> int:
    """Measure every candidate, interleaved, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    rng = random.Random(7)  # noqa: S311
    tokens = [rng.randrange(150_000) for _ in range(arguments.tokens)]
    packed, blocks = digests.pack(tokens), arguments.tokens // BLOCK_SIZE
    start = digests.seed("identity", "salt")
    known = digests.chain(start, tokens, block_size=BLOCK_SIZE, blocks=blocks - NEW_TOKENS // BLOCK_SIZE)
    work: dict[str, Callable[[], object]] = {
        f"{name}, hashing alone": lambda one_shot=one_shot: chain(one_shot, packed)
        for name, one_shot in candidates().items()
    }
    work["packing the token ids alone"] = lambda: digests.pack(tokens)
    work["connector, first turn"] = lambda: digests.chain(start, tokens, block_size=BLOCK_SIZE, blocks=blocks)
    work["connector, next turn"] = lambda: digests.chain(
        start, tokens, block_size=BLOCK_SIZE, blocks=blocks, known=known
    )
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(arguments.repetitions):
        for name, run in work.items():
            started_s = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - started_s) * 1000)
    print(f"{arguments.tokens} tokens, {blocks} blocks of {BLOCK_SIZE} (ms, medians)")
    for name, taken in samples.items():
        print(f"{name:32} {statistics.median(taken):8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
