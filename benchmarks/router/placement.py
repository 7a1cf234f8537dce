"""Which way to the first token is the fastest, and does `mode_policy = "cheapest"` find it?

    python benchmarks/router/placement.py [--json FILE]

Real engines (one prefill, one decode), real NIXL, SmolLM2-135M, one thread each. Four routers stand in front of the same two
engines: one reads everything back (the default), one has prefill compute everything, one leaves every turn that it can to decode,
and one takes the cheapest way. Each plays the same conversations, turn by turn in changing order: short questions, tool
results of some hundred tokens, and long ones, in a short history and a long one. Prints time to first token by router and by what a
turn brings, what the cheapest chose and why, and whether all answers were equal, token for token; computing everything is the cold
run that the others are held to. Last, what a turn does to an answer that decode streams meanwhile. Exit code 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import httpx2

from bidikv_server.launch import readiness
from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.errors import LaunchError
from bidikv_server.launch.model import prepare_smollm2
from bidikv_server.launch.ports import free_ports, http_url
from bidikv_server.launch.process import Children, ChildSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

POLICIES: Final = {
    "readback": "readback",
    "recompute": "fixed_modes:recompute",
    "decode": "fixed_modes:alone",
    "cheapest": "cheapest",
}
"""Name in the tables, and the setting."""
COLD: Final = "recompute"
ENGINE_ARGS: Final = ("--max-model-len", "8192", "--num-gpu-blocks-override", "1300")
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1"}
ANSWER_TOKENS: Final = 16
STORY: Final = (
    "The old lighthouse stood on a rock in the sea. Every evening the keeper climbed the stairs and lit the lamp. "
    "Ships from many countries passed, and the keeper wrote their names into a book. "
)
"""About 40 tokens."""
BRINGS: Final = {"question": 0, "small result": 3, "result": 10, "large result": 18}
"""What a turn brings: so many stories, and a question."""
ORDER: Final = ("question", "question", "small result", "result", "question", "large result", "small result")
BESIDE_STORIES: Final = 20
SETTLED_EVENTS: Final = 5
HISTORIES: Final = {"short": 4, "long": 40}
"""Stories in the first request."""


@dataclass(frozen=True, slots=True)
class Played:
    """One turn.

    Attributes:
        policy: Which router.
        history: How the conversation began.
        turn: Its number, from 0.
        brings: What it adds.
        prompt_tokens: Its prompt; None where nobody said.
        ttft_s: From the request to the first event of the answer.
        mode: How it got its prompt's KV.
        mode_reason: Why in that way.
        reason: Of its reuse.
        tokens: Generated.
    """

    policy: str
    history: str
    turn: int
    brings: str
    prompt_tokens: int | None
    ttft_s: float
    mode: str
    mode_reason: str
    reason: str
    tokens: tuple[int, ...]


class Player:
    """One conversation through one router."""

    def __init__(self, policy: str, url: str, model: str, history: str) -> None:
        self._policy, self._url, self._model, self._history = policy, url, model, history
        self._messages: list[dict[str, str]] = [{"role": "system", "content": "You are a helpful assistant."}]
        self._salt, self._session = uuid.uuid4().hex, uuid.uuid4().hex
        self._turn = 0
        self._client = httpx2.Client(timeout=300)
        self.first_token_s = 0.0
        """When the last turn's answer began."""

    def turn(self, brings: str, stories: int) -> Played:
        """Play the next one, streamed and greedy."""
        text = f"Part {self._turn}. " + STORY * stories + f"What happened in part {self._turn}?"
        self._messages.append({"role": "user", "content": text})
        body = {
            "model": self._model,
            "messages": self._messages,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": self._salt,
        }
        tokens, said, first_s = [], "", 0.0
        started_s = time.perf_counter()
        with self._client.stream(
            "POST", f"{self._url}/v1/chat/completions", json=body, headers={"X-Session-ID": self._session}
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not first_s:
                    self.first_token_s = time.perf_counter()
                    first_s = self.first_token_s - started_s
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
                        said += choice["delta"].get("content") or ""
            key = answer.headers["x-bidikv-session"]
        self._messages.append({"role": "assistant", "content": said})
        told = self._client.get(f"{self._url}/v1/bidikv/conversations/{key}").json()["recent"][0]
        played = Played(
            self._policy,
            self._history,
            self._turn,
            brings,
            told["prompt_tokens"],
            first_s,
            told["mode"],
            told["mode_reason"],
            told["reason"],
            tuple(tokens),
        )
        self._turn += 1
        return played

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()


class Running:
    """Somebody's answer that decode streams meanwhile."""

    def __init__(self, url: str, model: str) -> None:
        self._body = {
            "model": model,
            "prompt": STORY,
            "temperature": 0,
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        }
        self._url = f"{url}/v1/completions"
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.at_s: list[float] = []

    def __enter__(self) -> Self:
        """Until it runs evenly."""
        self._thread.start()
        if not self._begun.wait(60):
            raise LaunchError(f"{self._url} streams nothing")
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave it."""
        self._stop.set()
        self._thread.join()

    def longest_gap_s(self, start_s: float, end_s: float) -> float:
        """Between two events of it, in this time."""
        pairs = itertools.pairwise(at_s for at_s in self.at_s)
        return max((late - early for early, late in pairs if late >= start_s and early <= end_s), default=0.0)

    def _read(self) -> None:
        with (
            httpx2.Client(timeout=300) as client,
            client.stream("POST", self._url, json=self._body) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    self.at_s.append(time.perf_counter())
                if len(self.at_s) > SETTLED_EVENTS:
                    self._begun.set()
                if self._stop.is_set():
                    return


def beside(urls: dict[str, str], cluster: Cluster, *, rounds: int) -> dict[str, list[float]]:
    """The longest pause of an answer that decode streams, while a turn with a tool result gets its first token; by policy."""
    players = {policy: Player(policy, url, cluster.model_name, "long") for policy, url in urls.items()}
    for player in players.values():
        for stories in (BESIDE_STORIES, 0):
            player.turn("first", stories)
    gaps: dict[str, list[float]] = {policy: [] for policy in players}
    for number in range(rounds):
        names = [*players][number % len(players) :] + [*players][: number % len(players)]
        for name in names:
            with Running(cluster.decode_urls[0], cluster.model_name) as running:
                started_s = time.perf_counter()
                turn = players[name].turn("small result", BRINGS["small result"])
                until_s = players[name].first_token_s
                # The event that ends the last pause.
                while running.at_s[-1] < until_s:
                    time.sleep(0.01)
            gaps[name].append(running.longest_gap_s(started_s, until_s))
            say(f"beside a running answer, {name} ({turn.mode}): a pause of {gaps[name][-1]:.2f} s")
    for player in players.values():
        player.close()
    return gaps


@contextlib.contextmanager
def routers(cluster: Cluster) -> Iterator[dict[str, str]]:
    """One for each policy, in front of the cluster's engines; their URLs."""
    urls = {
        policy: http_url("127.0.0.1", port)
        for policy, port in zip(POLICIES, free_ports(len(POLICIES)), strict=True)
    }
    folder = Path(__file__).parent
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    logs = Path(tempfile.mkdtemp(prefix="bidikv-placement-"))
    with Children() as children:
        for policy, url in urls.items():
            argv = [sys.executable, "-m", "bidikv_server.cli", "router", "--port", url.rpartition(":")[2]]
            argv += ["--prefill", cluster.prefill_urls[0], "--decode", cluster.decode_urls[0]]
            env = {**os.environ, "PYTHONPATH": path, "BIDIKV_ROUTER_MODE_POLICY": POLICIES[policy]}
            children.start(ChildSpec(f"router {policy}", tuple(argv), env, logs / f"{policy}.log"))
        deadline_s = time.monotonic() + 60
        while not all(readiness.router_is_ready(url, 2, 1) for url in urls.values()):
            if time.monotonic() > deadline_s:
                raise LaunchError(f"the routers do not start; their logs are in {logs}")
            time.sleep(0.1)
        yield urls


def play(urls: dict[str, str], model: str, *, conversations: int, turns: int) -> list[Played]:
    """Every conversation through every router, turn by turn."""
    played: list[Played] = []
    for number in range(conversations):
        history, stories = list(HISTORIES.items())[number % len(HISTORIES)]
        players = {policy: Player(policy, url, model, history) for policy, url in urls.items()}
        for turn in range(turns):
            brings = ORDER[(turn - 1) % len(ORDER)] if turn else "first"
            # Whoever goes first finds the engines as the last of the turn before left them.
            start = (number + turn) % len(players)
            names = [*players][start:] + [*players][:start]
            done = {name: players[name].turn(brings, BRINGS[brings] if turn else stories) for name in names}
            played += done.values()
            told = ", ".join(f"{name} {done[name].ttft_s:.2f} s" for name in POLICIES)
            say(f"{history} history, turn {turn} ({brings}): {told}; cheapest: {done['cheapest'].mode}")
        for player in players.values():
            player.close()
    return played


def differing(played: Sequence[Played], conversations_of: int) -> list[Played]:
    """Turns whose answer is not the cold run's. Turns come in groups, one of each policy."""
    groups = (played[n : n + conversations_of] for n in range(0, len(played), conversations_of))
    found = []
    for group in groups:
        (cold,) = (turn for turn in group if turn.policy == COLD)
        found += [turn for turn in group if turn.tokens != cold.tokens]
    return found


def summary(played: Sequence[Played]) -> dict[str, dict[str, Any]]:
    """Time to first token of every turn but the first ones, by policy, and within by what turns bring."""
    warm = [turn for turn in played if turn.turn]
    found: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        mine = [turn for turn in warm if turn.policy == policy]
        found[policy] = {
            "turns": len(mine),
            "ttft_p50_s": _quantile([turn.ttft_s for turn in mine], 0.5),
            "ttft_p90_s": _quantile([turn.ttft_s for turn in mine], 0.9),
            "ttft_mean_s": statistics.fmean(turn.ttft_s for turn in mine),
            "ttft_p50_s_by": {
                f"{history}, {brings}": _quantile(
                    [turn.ttft_s for turn in mine if (turn.history, turn.brings) == (history, brings)], 0.5
                )
                for history in HISTORIES
                for brings in BRINGS
            },
            "choices": {
                " ".join(choice): count
                for choice, count in Counter(
                    (turn.mode, turn.mode_reason, turn.reason) for turn in mine
                ).most_common()
            },
            "choices_by": {
                brings: dict(Counter(turn.mode for turn in mine if turn.brings == brings))
                for brings in BRINGS
            },
        }
    return found


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def show(found: dict[str, dict[str, Any]]) -> None:
    """The tables."""

    def row(name: str, cells: Sequence[float | None]) -> str:
        return f"{name:26}" + "".join(f"{cell:12.2f}" if cell is not None else f"{'-':>12}" for cell in cells)

    print(f"{'TTFT in s':26}" + "".join(f"{policy:>12}" for policy in POLICIES))
    for name, key in (("p50", "ttft_p50_s"), ("p90", "ttft_p90_s"), ("mean", "ttft_mean_s")):
        print(row(name, [found[policy][key] for policy in POLICIES]))
    for kind in found[COLD]["ttft_p50_s_by"]:
        print(row(kind, [found[policy]["ttft_p50_s_by"][kind] for policy in POLICIES]))
    for policy in POLICIES:
        print(f"{policy}: " + "; ".join(f"{n} {choice}" for choice, n in found[policy]["choices"].items()))
    print(f"cheapest, by what turns bring: {found['cheapest']['choices_by']}")


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Play, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--conversations", type=int, default=2, help="short and long histories in turn (default: 2)"
    )
    parser.add_argument("--turns", type=int, default=10, help="of each conversation (default: 10)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="of turns beside a running answer; 0 leaves them out (default: 3)",
    )
    parser.add_argument(
        "--prefill-prefix-caching",
        action="store_true",
        help="prefill has a prefix cache of its own (default: not)",
    )
    parser.add_argument("--json", type=Path, help="write every turn and the figures here")
    arguments = parser.parse_args()
    if arguments.conversations < 1 or arguments.turns < 2 or arguments.rounds < 0:
        parser.error("--conversations needs 1 at least, --turns 2, --rounds 0")
    spec = ClusterSpec(
        prepare_smollm2(),
        prefill_prefix_caching=arguments.prefill_prefix_caching,
        engine_args=ENGINE_ARGS,
        engine_env=ENVIRONMENT,
    )
    started_s = time.monotonic()
    try:
        with Cluster(spec, progress=say) as cluster, routers(cluster) as urls:
            played = play(
                urls, cluster.model_name, conversations=arguments.conversations, turns=arguments.turns
            )
            gaps = beside(urls, cluster, rounds=arguments.rounds) if arguments.rounds else {}
    except LaunchError as error:
        say(f"error: {error}")
        return 2
    found, wrong = summary(played), differing(played, len(POLICIES))
    show(found)
    for policy, pauses in gaps.items():
        found[policy]["longest_pause_p50_s"] = statistics.median(pauses)
        found[policy]["longest_pause_max_s"] = max(pauses)
    if gaps:
        pauses = ", ".join(f"{policy} {statistics.median(gaps[policy]):.2f} s" for policy in gaps)
        print(f"longest pause of an answer that decode streams meanwhile (median): {pauses}")
    print(
        f"{len(played)} answers, {len(wrong)} of them not the cold run's; {time.monotonic() - started_s:.0f} s"
    )
    for turn in wrong:
        print(f"differs: {turn}")
    if arguments.json:
        figures = {
            "policies": found,
            "differing": len(wrong),
            "prefill_prefix_caching": arguments.prefill_prefix_caching,
            "turns": [asdict(turn) for turn in played],
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
