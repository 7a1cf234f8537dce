"""Part 6: lookup and verification inside engines, at prompts of up to 8,192 blocks, with a model of next to no size."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bidikv_server import wire
from bidikv_server.launch import readiness
from comparison import tiny_model
from comparison.calls import CallFailedError, page, post
from comparison.clusters import BLOCK_TOKENS, TimedCluster, timed
from comparison.marks import Marks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES: Final = (64, 2048, 8192)
"""Whole blocks of a prompt; the first stands for a short one, the others for 32 k and 128 k tokens of 16-token blocks."""
LOOKUPS: Final = 11
"""Of each size."""
_SPARE_TOKENS: Final = 512
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Inside:
    """One prompt size; all times are in milliseconds, medians over the repetitions except `metric_mean_ms`.

    Attributes:
        blocks: Whole blocks of the prompt.
        repetitions: How often it was looked up.
        pulled_blocks: Of each prompt, by prefill's account.
        metric_mean_ms: `bidikv:lookup_seconds`: from the request's arrival at the scheduler to the answer taken by it.
        median_ms: The median of the same.
        digests_ms: Hashing, a part of it.
        new_request_ms: The whole hook in which the prompt is hashed and the question sent.
        asking_ms: The scheduler's questions for the answer, all of them together.
        round_trip_ms: From the question's `submit` to its answer.
        validation_ms: The same for the question after the read.
        recording_ms: Decode's hook at the end of the turn, in which it hashes and records the blocks (once).
    """

    blocks: int
    repetitions: int
    pulled_blocks: int
    metric_mean_ms: float
    median_ms: float
    digests_ms: float
    new_request_ms: float
    asking_ms: float
    round_trip_ms: float
    validation_ms: float
    recording_ms: float

    @property
    def engine_thread_ms(self) -> float:
        """What the engine core's thread pays before prefill may pull."""
        return self.new_request_ms + self.asking_ms


def measure(
    folder: Path, say: Callable[[str], None], sizes: tuple[int, ...] = SIZES, repetitions: int = LOOKUPS
) -> list[Inside]:
    """Let decode hold a prompt of each size, then look it up from prefill some times, each time with another end."""
    longest = max(sizes) * BLOCK_TOKENS + _SPARE_TOKENS
    model = tiny_model.write(folder, longest)
    blocks = max(sizes) * (repetitions + 3) + 4096
    arguments = ("--max-model-len", str(longest), "--num-gpu-blocks-override", str(blocks))
    with timed(model, arguments, say) as cluster:
        say(f"logs in {cluster.log_dir}")
        return [_measure(cluster, size, repetitions, say) for size in sizes]


def _measure(cluster: TimedCluster, blocks: int, repetitions: int, say: Callable[[str], None]) -> Inside:
    prefill, decode = cluster.prefill_urls[0], cluster.decode_urls[0]
    source = readiness.index_address(decode)
    if source is None:
        raise CallFailedError(f"{decode} publishes no retention index")
    rng = Random(blocks)  # noqa: S311
    words = range(100, tiny_model.VOCABULARY)
    prompt = [rng.choice(words) for _ in range(blocks * BLOCK_TOKENS + 8)]
    conversation, salt = uuid.uuid4().hex, "benchmark"
    marks = Marks(cluster)
    say(f"  {blocks} blocks: decode computes and records the prompt")
    retained = wire.decode_leg({}, conversation=conversation, salt=salt, retain_s=_HOUR_S)
    post(f"{decode}/v1/completions", _body(cluster, prompt, retained), timeout_s=_HOUR_S)
    recording = marks.new("decode-0")["request_finished"][-1]
    marks.new("prefill-0")
    before = page(prefill)
    pulled = []
    for _ in range(repetitions):
        asked = [*prompt, *(rng.choice(words) for _ in range(16))]
        leg = wire.prefill_leg(conversation=conversation, salt=salt, sources=[source])
        answer = post(f"{prefill}/v1/completions", _body(cluster, asked, leg), timeout_s=_HOUR_S).body
        account = answer["kv_transfer_params"][wire.KEY]
        pulled.append(account["remote_tokens"] // BLOCK_TOKENS)
    after, times = page(prefill), marks.new("prefill-0")
    count = after.value("bidikv:lookup_seconds_count") - before.value("bidikv:lookup_seconds_count")
    total = after.value("bidikv:lookup_seconds_sum") - before.value("bidikv:lookup_seconds_sum")
    result = Inside(
        blocks,
        int(count),
        min(pulled),
        1000 * total / count,
        median(times["arrival to answer"]),
        median(times["digests"]),
        median(times["on_new_request"]),
        median(times["asking"]),
        median(times["round trip Lookup"]),
        median(times["round trip Validate"]),
        recording,
    )
    say(
        f"  {blocks} blocks: lookup {result.median_ms:.1f} ms (hashing {result.digests_ms:.1f}), "
        f"validation {result.validation_ms:.1f} ms, {result.pulled_blocks} blocks pulled"
    )
    return result


def _body(cluster: TimedCluster, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": cluster.model_name,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "kv_transfer_params": params,
    }
