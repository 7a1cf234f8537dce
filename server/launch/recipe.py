"""The command line and environment of one vLLM engine, as a pure function of its spec."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from bidikv_server.launch.model import ModelCard
from bidikv_server.wire import SECRET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Role = Literal["prefill", "decode"]
Platform = Literal["cpu", "gpu"]


_FIXED_THRESHOLD: Final = 64


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """How much is reused.

    Attributes:
        retention_ttl_s: The longest time that decode keeps a turn's blocks.
        recompute_threshold: Smallest number of tokens that prefill pulls; "auto" learns it for each pair of engines.
        protected_share: Largest share of decode's blocks held for conversations that said when they come back.
    """

    retention_ttl_s: float = 480
    recompute_threshold: int | Literal["auto"] = _FIXED_THRESHOLD
    protected_share: float = 0.25


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine to run on this machine.

    Attributes:
        role: Which half of a turn it serves.
        model: Checkpoint folder.
        port: Where its API listens.
        nixl_port: Where it answers NIXL handshakes.
        index_port: Where a decode engine serves its retention index.
        platform: What vLLM was built for.
        card: What is known of the model beyond its folder.
        readback: Whether prefill pulls what decode retained; off serves like stock vLLM.
        reuse: How much of it.
        secret: Shared by the engines of one deployment; None accepts any peer.
        prefix_caching: None leaves vLLM's default.
        served_model_name: What clients call the model; the folder's name by default.
        tcmalloc: The allocator library to preload, where there is one.
        cpu_threads: Threads per engine on a CPU build.
        host: The address that all of its ports bind to.
        extra_args: Passed to vLLM as they are, last, so that they win.
    """

    role: Role
    model: Path
    port: int
    nixl_port: int
    index_port: int
    platform: Platform
    card: ModelCard = field(default_factory=ModelCard)
    readback: bool = True
    reuse: ReuseSettings = field(default_factory=ReuseSettings)
    secret: str | None = None
    prefix_caching: bool | None = None
    served_model_name: str | None = None
    tcmalloc: str | None = None
    cpu_threads: int = 1
    host: str = "127.0.0.1"
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to execute.

    Attributes:
        argv: The program and its arguments.
        env: Variables that the engine needs as they are.
        default_env: Variables that the caller's environment may set otherwise.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    default_env: Mapping[str, str] = field(default_factory=dict)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The whole environment, on top of the caller's."""
        return {**self.default_env, **base, **self.env}

    def shell(self) -> str:
        """One line for a POSIX shell. The secret is not in it."""
        shown = {
            key: value for key, value in {**self.default_env, **self.env}.items() if key != SECRET_VARIABLE
        }
        words = [f"{key}={shlex.quote(value)}" for key, value in shown.items()]
        return " ".join([*words, *(shlex.quote(word) for word in self.argv)])


def engine_command(spec: EngineSpec) -> EngineCommand:
    """Build the command of one engine."""
    argv = [
        # Not the `vllm` console command: in the CPU build it looks up a distribution that is not there.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(spec.model)),
        *("--served-model-name", spec.served_model_name or spec.model.name),
        *("--host", spec.host),
        *("--port", str(spec.port)),
        *("--kv-transfer-config", json.dumps(kv_transfer_config(spec))),
        "--disable-uvicorn-access-log",
        "--enable-request-id-headers",
        "--enable-prompt-tokens-details",
    ]
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.nixl_port)}
    default_env: dict[str, str] = {}
    if spec.secret is not None:
        env[SECRET_VARIABLE] = spec.secret
    if spec.prefix_caching is not None:
        argv.append("--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching")
    if spec.card.max_model_len is not None:
        argv += ["--max-model-len", str(spec.card.max_model_len)]
    if spec.card.tool_calls == "arguments":
        argv += _BARE_ARGUMENTS_ARGS
        env |= _BARE_ARGUMENTS_ENV
    if spec.platform == "cpu":
        argv += _CPU_ARGS
        default_env |= _cpu_env(spec)
    return EngineCommand((*argv, *spec.extra_args), env, default_env)


def kv_transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`."""
    return {
        "kv_connector": "BidiNixlConnector",
        "kv_connector_module_path": "bidikv_server.connector",
        # A prefill engine that reads back consumes KV too. vLLM has to know: as a mere producer it would hand out the blocks
        # of an aborted request while a step still writes to them, and a readback could land there.
        "kv_role": _kv_role(spec),
        # A block that cannot be loaded is recomputed; vLLM's default fails the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "bidikv": {
                "role": spec.role,
                "readback": spec.readback,
                "index_host": spec.host,
                "index_port": spec.index_port,
                "protected_share": spec.reuse.protected_share,
                "learn_threshold": spec.reuse.recompute_threshold == "auto",
            },
            "decoder_kv_blocks_ttl": spec.reuse.retention_ttl_s,
            # vLLM's own connector reads this one as a number.
            "kv_recompute_threshold": _FIXED_THRESHOLD
            if spec.reuse.recompute_threshold == "auto"
            else spec.reuse.recompute_threshold,
        },
    }


def _kv_role(spec: EngineSpec) -> str:
    if spec.role == "decode":
        return "kv_consumer"
    return "kv_both" if spec.readback else "kv_producer"


# A template that writes a tool call as its bare arguments needs an engine that generates them so, without
# `<tool_call>` tags around them. JSON's whitespace is left to the model: told to write none, it picks tokens that the
# tokenizer would not, and the next turn's prompt differs from what was generated at the first of them.
_BARE_ARGUMENTS_ARGS: Final = ("--enable-auto-tool-choice", *("--tool-call-parser", "hermes"))
_BARE_ARGUMENTS_ENV: Final = {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}

_CPU_ARGS: Final = (
    # Only whole blocks are reused; vLLM's CPU default of 128 tokens would leave up to 127 to recompute every turn.
    *("--block-size", "32"),
    # bfloat16 without AVX512 is an order of magnitude slower.
    *("--dtype", "float32"),
    "--enforce-eager",
    # By its full name: vLLM rewrites the short `uni` to `mp` on CPU, and two `mp` engines starve each other on a
    # few cores until one dies of its RPC timeout.
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
)


def _cpu_env(spec: EngineSpec) -> dict[str, str]:
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(spec.cpu_threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "UCX_TLS": "tcp,sm,self",
        # NIXL moves the state of Mamba layers in this layout only; vLLM chooses it by itself for connectors whose name it knows.
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return env | ({"LD_PRELOAD": spec.tcmalloc} if spec.tcmalloc else {})
