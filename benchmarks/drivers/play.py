"""Other people's load generators, unmodified, through `bidikv up`: do their turns hit?

    python benchmarks/drivers/play.py vllm-multi-turn --script PATH/benchmark_serving_multi_turn.py [--json FILE]
    python benchmarks/drivers/play.py aiperf --program PATH/bin/aiperf [--json FILE]

Real engines, real NIXL, SmolLM2-135M; prefill's own prefix cache is off, so that all reuse is readback. The first is vLLM's
own benchmark (`benchmarks/multi_turn/` of its source, and what its `requirements.txt` asks for); the second is NVIDIA's, in a
virtual environment of its own. Each plays its conversations once with readback and once without, on the same engines' flags,
and this prints what the router counted. Exit code 1 if warm turns did not reuse what decode held, or a request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.errors import LaunchError
from bidikv_server.launch.model import prepare_smollm2

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINE_ARGS: Final = ("--max-model-len", "8192", "--num-gpu-blocks-override", "1000")
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1"}
CONVERSATIONS: Final = 6
TURNS: Final = 5
"""User turns a conversation."""
PREFIX_TOKENS: Final = 800
QUESTION_TOKENS: Final = 150
ANSWER_TOKENS: Final = 100
PATIENCE_S: Final = 1800.0
WARM_REASONS: Final = frozenset({"hit", "hit_diverged", "hit_evicted"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One tool's run.

    Attributes:
        readback: Whether decode's blocks could be read back.
        seconds: Of the tool's process.
        turns: Answered turns by the reason of their reuse.
        tokens: Prompt tokens by where their KV came from.
        identities: Turns by the convention that named their conversation.
        failed: Turns without a clean end.
        ttft_mean_s: From the whole request to the first byte of its answer, all turns.
    """

    readback: bool
    seconds: float
    turns: dict[str, float]
    tokens: dict[str, float]
    identities: dict[str, float]
    failed: float
    ttft_mean_s: float

    @property
    def warm(self) -> float:
        """Turns that read anything back."""
        return sum(count for reason, count in self.turns.items() if reason in WARM_REASONS)


def vllm_multi_turn(script: Path, folder: Path) -> Callable[[Cluster], list[str]]:
    """The command line of vLLM's script, over conversations that it makes from a text of ours."""
    text = folder / "text.txt"
    text.write_text("\n".join(path.read_text() for path in sorted((_ROOT / "docs").rglob("*.md"))))

    def constant(value: int) -> dict[str, object]:
        return {"distribution": "constant", "value": value}

    plan = {
        "filetype": "generate_conversations",
        "num_conversations": CONVERSATIONS,
        "text_files": [str(text)],
        "print_stats": False,
        "prompt_input": {
            "num_turns": constant(2 * TURNS),
            "common_prefix_num_tokens": constant(100),
            "prefix_num_tokens": constant(PREFIX_TOKENS),
            "num_tokens": constant(QUESTION_TOKENS),
        },
        "prompt_output": {"num_tokens": constant(ANSWER_TOKENS)},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return lambda cluster: [
        *(sys.executable, str(script), "--input-file", str(folder / "plan.json")),
        *("--model", str(cluster.spec.model), "--served-model-name", cluster.model_name),
        *("--url", cluster.router_url, "--num-clients", "1", "--max-active-conversations", "2"),
        *("--send-conversation-id", "--no-early-stop", "--request-timeout-sec", "600"),
    ]


def aiperf(program: Path, folder: Path) -> Callable[[Cluster], list[str]]:
    """The command line of aiperf, over synthetic conversations of its own."""
    return lambda cluster: [
        *(str(program), "profile", "--url", cluster.router_url, "--endpoint-type", "chat", "--streaming"),
        *("--model", cluster.model_name, "--tokenizer", str(cluster.spec.model), "--random-seed", "1"),
        *("--num-sessions", str(CONVERSATIONS), "--concurrency", "2", "--session-turns-mean", str(TURNS)),
        *("--synthetic-input-tokens-mean", str(QUESTION_TOKENS), "--output-tokens-mean", str(ANSWER_TOKENS)),
        *("--artifact-dir", str(folder / "aiperf"), "--ui", "none", "--request-timeout-seconds", "600"),
    ]


def play(command: Callable[[Cluster], list[str]], *, readback: bool, folder: Path, log: Path) -> Outcome:
    """Run the tool once through a cluster of its own.

    Raises:
        subprocess.SubprocessError: The tool failed or did not end.
    """
    spec = ClusterSpec(
        prepare_smollm2(),
        readback=readback,
        prefill_prefix_caching=False,
        engine_args=ENGINE_ARGS,
        engine_env=ENVIRONMENT,
    )
    with Cluster(spec, progress=say) as cluster:
        argv = command(cluster)
        say(" ".join(argv))
        started_s = time.monotonic()
        with log.open("w") as output:
            # Its own counters of the day go to nobody. The model is a folder; aiperf takes none if the hub is said to be away.
            env = {**os.environ, "DO_NOT_TRACK": "1"}
            subprocess.run(
                argv,
                cwd=folder,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_S,
                check=True,
            )
        seconds = time.monotonic() - started_s
        with urllib.request.urlopen(f"{cluster.router_url}/metrics", timeout=30) as response:  # noqa: S310
            return counted(response.read().decode(), readback=readback, seconds=seconds)


def counted(page: str, *, readback: bool, seconds: float) -> Outcome:
    """What the router's metrics page says about the turns so far."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def by(name: str, label: str) -> dict[str, float]:
        found = {sample.labels[label]: sample.value for sample in samples if sample.name == name}
        return {key: value for key, value in found.items() if value}

    def total(name: str) -> float:
        return sum(sample.value for sample in samples if sample.name == name)

    return Outcome(
        readback,
        seconds,
        by("bidikv_router_turns_total", "reason"),
        by("bidikv_router_prompt_tokens_total", "source"),
        by("bidikv_router_identities_total", "source"),
        total("bidikv_router_failed_turns_total"),
        total("bidikv_router_ttft_seconds_sum") / max(1.0, total("bidikv_router_ttft_seconds_count")),
    )


def good(with_readback: Outcome) -> bool:
    """Nothing failed, and every turn but each conversation's first read back."""
    answered = sum(with_readback.turns.values())
    return not with_readback.failed and 0 < answered <= with_readback.warm + CONVERSATIONS


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Play with and without readback, print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    multi_turn = tools.add_parser("vllm-multi-turn", help="vLLM's benchmark_serving_multi_turn.py")
    multi_turn.add_argument("--script", type=Path, required=True, help="the script, beside its modules")
    other = tools.add_parser("aiperf", help="NVIDIA's aiperf")
    other.add_argument("--program", type=Path, required=True, help="the aiperf executable")
    for tool in (multi_turn, other):
        tool.add_argument("--json", type=Path, help="write the figures here")
        tool.add_argument(
            "--logs", type=Path, default=Path(), help="where the tool's output goes (default: here)"
        )
    arguments = parser.parse_args()
    program: Path = arguments.script if arguments.tool == "vllm-multi-turn" else arguments.program
    if not program.is_file():
        parser.error(f"there is no file {program}")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    try:
        for readback in (True, False):
            with TemporaryDirectory() as folder:
                make = vllm_multi_turn if arguments.tool == "vllm-multi-turn" else aiperf
                log = arguments.logs / f"{arguments.tool}-{'readback' if readback else 'plain'}.log"
                command = make(program.absolute(), Path(folder))
                outcomes.append(play(command, readback=readback, folder=Path(folder), log=log.absolute()))
    except KeyboardInterrupt:
        say("interrupted: every engine was ended")
        return 130
    except LaunchError as error:
        say(str(error))
        return 2
    except subprocess.SubprocessError as error:
        say(f"{error}; its output is in {arguments.logs.absolute()}")
        return 2
    for outcome in outcomes:
        print(json.dumps(asdict(outcome)))
    ratio = outcomes[1].ttft_mean_s / outcomes[0].ttft_mean_s if outcomes[0].ttft_mean_s else 0.0
    print(f"mean time to first byte without readback over with: {ratio:.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    return 0 if good(outcomes[0]) else 1


_ROOT: Final = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.exit(main())
