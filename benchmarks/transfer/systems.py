"""Runs transfer systems on real engines behind the router, and compares every greedy answer with one computed cold.

    python benchmarks/transfer/systems.py nixl nixl-push nixl-bidirectional

Each system gets two engines of the packaged model and the router. One conversation grows by appended turns, whole and
streamed, and is then edited, cut and regenerated. Exit code 1 on any wrong answer. `--packages DIR` adds a folder of packages to
the engines' path, for systems that are not installed beside vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import bidikv
from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.model import prepare_smollm2
from bidikv_server.launch.ports import free_ports

HERE: Final = Path(__file__).parent
STORY: Final = (
    "The old lighthouse stood on a rock in the sea. Every evening the keeper climbed the stairs and lit the lamp. "
    "Ships from many countries passed, and the keeper wrote their names into a book. "
)
ANSWER_TOKENS: Final = 40


@dataclass(frozen=True)
class System:
    """How engines of one system are started.

    Attributes:
        config: vLLM's `--kv-transfer-config` of both engines.
        prefill: What differs on prefill.
        decode: What differs on decode.
        bootstrap: Prefill has a bootstrap server.
    """

    config: dict[str, Any]
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    bootstrap: bool = False


def nixl(name: str = "NixlConnector", **extra: Any) -> dict[str, Any]:
    """Stock NIXL with an agent that leaves the cores to the engines."""
    module = {"kv_connector_module_path": "comparison.quiet_nixl"} if name == "NixlConnector" else {}
    return {
        "kv_connector": name,
        **module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    """All of them in one MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


LMCACHE: Final = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
MOONCAKE: Final = {
    "kv_connector": "MooncakeConnector",
    "kv_connector_module_path": "mooncake_cpu",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}
SYSTEMS: Final = {
    "nixl": System(nixl()),
    "nixl-push": System(nixl("NixlPushConnector")),
    "nixl-bidirectional": System(nixl(bidirectional_kv_xfer=True)),
    "mooncake": System(
        MOONCAKE, prefill={"kv_role": "kv_producer"}, decode={"kv_role": "kv_consumer"}, bootstrap=True
    ),
    "lmcache": System(LMCACHE),
    "nixl+lmcache": System(multi(nixl(), LMCACHE)),
}


class Turns:
    """One client, and what its answers came to."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = bidikv.OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=300)
        self._model = cluster.model_name
        self._session, self._salt = uuid.uuid4().hex, uuid.uuid4().hex
        self.wrong = 0

    def play(self, name: str, messages: list[dict[str, Any]], *, stream: bool = False) -> str:
        """One turn, beside the same prompt as nobody's turn; returns the answer's text."""
        started_s = time.perf_counter()
        text, reuse = self._ask(messages, self._session, self._salt, stream=stream)
        took_s = time.perf_counter() - started_s
        cold, _ = self._ask(messages, uuid.uuid4().hex, uuid.uuid4().hex, off=True)
        self.wrong += text != cold
        print(
            f"  {name:<28} {took_s:6.2f} s  {'right' if text == cold else 'WRONG'}  {reuse.format() if reuse else None}"
        )
        return text

    def _ask(
        self,
        messages: list[dict[str, Any]],
        session: str,
        salt: str,
        *,
        stream: bool = False,
        off: bool = False,
    ) -> tuple[str, bidikv.ReuseHeader | None]:
        headers = {"X-Session-ID": session, **({"x-bidikv-readback": "off"} if off else {})}
        answer: Any = self._client.chat.completions.create(
            model=self._model,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            stream=stream,
            extra_headers=headers,
            extra_body={"cache_salt": salt},
        )
        if stream:
            text = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
        else:
            if answer.model_extra.get("kv_transfer_params") or answer.choices[0].model_extra.get("token_ids"):
                raise RuntimeError("the router shows a client what engines say to each other")
            text = answer.choices[0].message.content or ""
        return text, bidikv.reuse_of(answer)


def conversation(cluster: Cluster) -> int:
    """Play it; how many answers were wrong."""
    turns = Turns(cluster)
    system = {"role": "system", "content": "You are a helpful assistant."}
    history = [system, {"role": "user", "content": STORY * 6 + "What did the keeper do?"}]
    for number, question in enumerate(
        ("And the ships?", "Tell me more of the sea.", "Who climbed the stairs?"), 1
    ):
        text = turns.play(f"turn {number}", history)
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    text = turns.play("streamed turn", history, stream=True)
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what then?"}]
    text = turns.play("after a streamed turn", history)
    turns.play("regenerated", history)
    longer = [*history, {"role": "assistant", "content": text}, {"role": "user", "content": "Sum it up."}]
    turns.play("appended once more", longer)
    edited = [system, {"role": "user", "content": STORY * 5 + "Who was the keeper?"}, *history[2:]]
    turns.play("edited at the start", edited)
    turns.play("cut to its first question", history[:2])
    return turns.wrong


def run(name: str, args: argparse.Namespace) -> int:
    """One system; how many answers were wrong."""
    system = SYSTEMS[name]
    paths = [
        str(HERE),
        str(HERE.parent / "connector"),
        *args.packages,
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    env = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **dict(args.env)}
    router_args = ["--transfer", name, "--readback"]
    if system.bootstrap:
        (port,) = free_ports(1)
        env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(port)
    spec = ClusterSpec(
        prepare_smollm2(),
        readback=False,
        prefill_prefix_caching=False,
        engine_args=("--max-model-len", "4096", "--enable-scale-out"),
        prefill_args=("--kv-transfer-config", json.dumps({**system.config, **system.prefill})),
        decode_args=("--kv-transfer-config", json.dumps({**system.config, **system.decode})),
        engine_env=env,
        router_args=tuple(router_args),
    )
    cluster = Cluster(spec, progress=lambda line: print(f"  {line}"))
    if system.bootstrap:
        cluster = _with_bootstrap(cluster, port)
    print(f"{name}: logs in {cluster.log_dir}", flush=True)
    with cluster:
        wrong = conversation(cluster)
        if args.wait:
            input("  running; press Enter to end it ")
    return wrong


def _with_bootstrap(cluster: Cluster, port: int) -> Cluster:
    """Tell the router where prefill's bootstrap server is, once prefill's own address is known."""
    plan = cluster._plan  # noqa: SLF001

    def planned() -> None:
        plan()
        table = dict.fromkeys(cluster.prefill_urls, f"http://127.0.0.1:{port}")
        os.environ["BIDIKV_ROUTER_MOONCAKE_BOOTSTRAP"] = json.dumps(table)

    cluster._plan = planned  # type: ignore[method-assign]  # noqa: SLF001
    return cluster


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=SYSTEMS, metavar="NAME", help=", ".join(SYSTEMS))
    parser.add_argument("--packages", action="append", default=[], help="folder of packages for the engines")
    parser.add_argument(
        "--env", action="append", default=[], type=lambda word: word.split("=", 1), metavar="NAME=VALUE"
    )
    parser.add_argument(
        "--wait", action="store_true", help="leave each cluster running until Enter is pressed"
    )
    args = parser.parse_args()
    sys.exit(1 if sum([run(name, args) for name in args.names]) else 0)


if __name__ == "__main__":
    main()
