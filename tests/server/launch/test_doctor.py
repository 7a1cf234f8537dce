"""The judgement of an installation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bidikv_server.launch.doctor import Facts, check, is_well
from bidikv_server.launch.inspection import inspect_machine

WELL = Facts(
    python=(3, 11, 7),
    bidikv="0.1.0",
    vllm="0.32.0",
    vllm_platform="cpu",
    nixl="1.5.1",
    torch="2.13.0+cpu",
    torch_companions={},
    tcmalloc="/lib/libtcmalloc_minimal.so.4",
    cores=2,
    free_memory_gib=16.0,
    router_missing=(),
    langgraph="1.2.0",
    model_path="/cache/smollm2",
    model_ready=True,
    router_port_holder=None,
)


def finding(facts, name):
    return next(f for f in check(facts) if f.name == name)


def test_a_good_installation_has_nothing_to_do():
    """Everything is ok and no fix is offered."""
    assert {f.status for f in check(WELL)} == {"ok"}
    assert not [f.fix for f in check(WELL) if f.fix]


@pytest.mark.parametrize(
    ("change", "name", "fix"),
    [
        ({"python": (3, 10, 1)}, "python", "3.11"),
        ({"vllm": None}, "vllm", "bidikv[gpu]"),
        ({"vllm": "0.31.0"}, "vllm", "0.32 and 0.33"),
        ({"nixl": None}, "nixl", "bidikv[cpu]"),
        ({"torch": None}, "torch", "bidikv[cpu]"),
        ({"router_missing": ("uvloop",)}, "router", "bidikv[router]"),
        ({"torch_companions": {"torchvision": "0.28.0"}}, "torch companions", "pip uninstall -y torchvision"),
    ],
)
def test_what_is_needed_fails_with_its_fix(change, name, fix):
    """Anything without which engines cannot run makes the whole check fail."""
    facts = replace(WELL, **change)
    assert finding(facts, name).status == "fail"
    assert fix in finding(facts, name).fix
    assert not is_well(check(facts))


@pytest.mark.parametrize(
    ("change", "name", "status"),
    [
        ({"tcmalloc": None}, "tcmalloc", "warn"),
        ({"cores": 1}, "cores", "warn"),
        ({"free_memory_gib": 3.0}, "memory", "warn"),
        ({"langgraph": None}, "langgraph", "info"),
        ({"model_path": None}, "small model", "info"),
        ({"model_ready": False}, "small model", "info"),
        ({"router_port_holder": "pid 7 (other)"}, "port 8000", "warn"),
        ({"torch_companions": {"torchaudio": "2.13.0"}}, "torch companions", "warn"),
    ],
)
def test_what_only_costs_something_does_not_fail(change, name, status):
    """A hint with a fix, and the check still passes."""
    facts = replace(WELL, **change)
    assert finding(facts, name).status == status
    assert finding(facts, name).fix
    assert is_well(check(facts))


def test_torchvision_is_no_trap_on_a_gpu_build():
    """Its ordinary build fits the ordinary torch."""
    facts = replace(WELL, torch="2.13.0", vllm_platform="gpu", torch_companions={"torchvision": "0.28.0"})
    assert is_well(check(facts))


def test_this_machine_can_be_inspected():
    """The facts of the machine that runs the tests are complete enough to judge."""
    assert check(inspect_machine())
