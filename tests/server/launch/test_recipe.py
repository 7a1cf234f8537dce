"""The command of one engine."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bidikv_server.connector.config import ConnectorConfig
from bidikv_server.launch.model import ModelCard
from bidikv_server.launch.recipe import EngineSpec, ReuseSettings, engine_command

SPEC = EngineSpec("decode", Path("/models/tiny"), 8200, 5700, 6900, "cpu", tcmalloc="/lib/tcmalloc.so")


def option(argv, name):
    return argv[argv.index(name) + 1]


def connector_config(spec):
    return json.loads(option(engine_command(spec).argv, "--kv-transfer-config"))


def test_starts_vllm_as_a_module_of_this_interpreter():
    """The `vllm` console command does not work in the CPU build."""
    assert engine_command(SPEC).argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_both"), ("decode", "kv_consumer")])
def test_names_the_connector_and_the_role(role, kv_role):
    """Both roles load the same connector, told which half it is."""
    config = connector_config(replace(SPEC, role=role))
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "BidiNixlConnector",
        "bidikv_server.connector",
    )
    assert config["kv_role"] == kv_role
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {
        "bidikv": {
            "role": role,
            "readback": True,
            "index_host": "127.0.0.1",
            "index_port": 6900,
            "protected_share": 0.25,
            "learn_threshold": False,
        },
        "decoder_kv_blocks_ttl": 480,
        "kv_recompute_threshold": 64,
    }


def test_the_connector_accepts_its_part():
    """What the recipe writes is what the connector's own parser reads."""
    config = ConnectorConfig.parse(connector_config(SPEC)["kv_connector_extra_config"])
    assert (config.role, config.index_port, config.kv_recompute_threshold) == ("decode", 6900, 64)


def test_how_much_is_reused_reaches_the_connector():
    """Time, threshold and budget are the engine's own settings."""
    spec = replace(SPEC, reuse=ReuseSettings(7.5, "auto", 0.5))
    config = ConnectorConfig.parse(connector_config(spec)["kv_connector_extra_config"])
    assert (config.decoder_kv_blocks_ttl, config.kv_recompute_threshold) == (7.5, 64)
    assert (config.learn_threshold, config.protected_share) == (True, 0.5)


def test_stock_mode_turns_readback_off():
    """Comparisons run the same connector with readback off."""
    assert (
        connector_config(replace(SPEC, readback=False))["kv_connector_extra_config"]["bidikv"]["readback"]
        is False
    )


def test_cpu_engines_get_the_recipe_for_few_cores():
    """Every flag and variable without which two engines starve each other."""
    command = engine_command(SPEC)
    assert option(command.argv, "--distributed-executor-backend").endswith("uniproc_executor.UniProcExecutor")
    assert option(command.argv, "--dtype") == "float32"
    assert "--enforce-eager" in command.argv
    environment = command.environment({})
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["UCX_TLS"] == "tcp,sm,self"
    assert environment["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"
    assert environment["LD_PRELOAD"] == "/lib/tcmalloc.so"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"


def test_gpu_engines_keep_vllms_defaults():
    """On a GPU nothing is tuned: only what disaggregation itself needs is set."""
    command = engine_command(replace(SPEC, platform="gpu"))
    assert not {"--enforce-eager", "--dtype", "--distributed-executor-backend"} & set(command.argv)
    assert set(command.environment({})) == {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"}


def test_the_callers_environment_may_tune_but_not_break():
    """A user may give an engine more memory, but two engines never share a side channel."""
    base = {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_NIXL_SIDE_CHANNEL_PORT": "1", "HOME": "/home/me"}
    environment = engine_command(SPEC).environment(base)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    assert environment["HOME"] == "/home/me"


@pytest.mark.parametrize(
    ("caching", "flag"), [(True, "--enable-prefix-caching"), (False, "--no-enable-prefix-caching")]
)
def test_prefix_caching_is_set_when_asked(caching, flag):
    """None leaves vLLM's default; anything else is explicit."""
    assert flag in engine_command(replace(SPEC, prefix_caching=caching)).argv
    assert not [word for word in engine_command(SPEC).argv if "prefix-caching" in word]


def test_a_model_card_sets_length_and_tool_format():
    """A template of bare arguments needs an engine that generates them so."""
    card = ModelCard(max_model_len=8192, tool_calls="arguments")
    command = engine_command(replace(SPEC, card=card))
    assert option(command.argv, "--max-model-len") == "8192"
    assert option(command.argv, "--tool-call-parser") == "hermes"
    assert command.env["VLLM_ENFORCE_STRICT_TOOL_CALLING"] == "0"
    plain = engine_command(SPEC)
    assert "--max-model-len" not in plain.argv
    assert "--tool-call-parser" not in plain.argv


def test_the_model_is_served_under_its_folders_name():
    """Unless another name is given."""
    assert option(engine_command(SPEC).argv, "--served-model-name") == "tiny"
    assert option(engine_command(replace(SPEC, served_model_name="m")).argv, "--served-model-name") == "m"


def test_extra_arguments_come_last():
    """So that they win over the recipe's."""
    assert engine_command(replace(SPEC, extra_args=("--dtype", "bfloat16"))).argv[-2:] == (
        "--dtype",
        "bfloat16",
    )


def test_the_secret_is_never_on_a_command_line():
    """It reaches the engine through the environment, and the printed command leaves it out."""
    command = engine_command(replace(SPEC, secret="hush-hush"))
    assert command.env["BIDIKV_SECRET"] == "hush-hush"
    assert "hush-hush" not in command.shell()
    assert not [word for word in command.argv if "hush-hush" in word]


def test_the_printed_command_can_be_pasted():
    """A shell reads back the same words."""
    words = shlex.split(engine_command(SPEC).shell())
    assert tuple(words[-len(engine_command(SPEC).argv) :]) == engine_command(SPEC).argv
