"""Ctrl-C, SIGTERM and deaths, on real processes with a stand-in for vLLM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from bidikv_server.launch.ports import free_ports


def descendants(log_dir: Path, model: Path) -> list[int]:
    """Live processes that mention this test's own folders on their command line, and their children."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if fields[0] not in {"Z", "X"}:
            found[int(stat.parent.name)] = (int(fields[2]), words)
    groups = {group for group, words in found.values() if str(model) in words or str(log_dir) in words}
    return [pid for pid, (group, _) in found.items() if group in groups and pid != os.getpid()]


def eventually(condition, timeout_s=30.0):
    """Wait until a condition holds, looking often."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition never held"
        time.sleep(0.05)


@contextmanager
def bidikv_up(model: Path, tmp_path: Path, env: dict[str, str]):
    """`bidikv up` in a process of its own; killed at the end if it still lives."""
    port = free_ports(1)[0]
    output = tmp_path / "output.txt"
    argv = [sys.executable, "-m", "bidikv_server.cli", "up", "--model", str(model), "--port", str(port)]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*argv, "--log-dir", str(tmp_path / "logs")],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, output
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_child(model, tmp_path, fake_vllm_env, number):
    """Ctrl-C and SIGTERM alike: exit code 130, no traceback, no process left."""
    with bidikv_up(model, tmp_path, fake_vllm_env) as (process, output):
        eventually(lambda: "serving tiny-model" in output.read_text())
        assert len(descendants(tmp_path / "logs", model)) >= 5
        process.send_signal(number)
        assert process.wait(30) == 130
    assert descendants(tmp_path / "logs", model) == []
    assert "Traceback" not in output.read_text()


def test_ctrl_c_while_engines_start_ends_them_too(model, tmp_path, fake_vllm_env):
    """An engine that is still loading is ended as well."""
    env = {**fake_vllm_env, "FAKE_VLLM_SLOW": "60"}
    with bidikv_up(model, tmp_path, env) as (process, output):
        eventually(lambda: len(descendants(tmp_path / "logs", model)) >= 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert descendants(tmp_path / "logs", model) == []
    assert "Traceback" not in output.read_text()


def test_a_killed_command_leaves_no_process(model, tmp_path, fake_vllm_env):
    """SIGKILL cannot be caught; the guardian ends the engines all the same."""
    with bidikv_up(model, tmp_path, fake_vllm_env) as (process, output):
        eventually(lambda: "serving tiny-model" in output.read_text())
        process.kill()
    eventually(lambda: descendants(tmp_path / "logs", model) == [])


def test_an_engine_that_dies_ends_the_cluster_with_its_log(model, tmp_path, fake_vllm_env):
    """Exit code 1, the engine's name, its last lines and the fix."""
    env = {**fake_vllm_env, "FAKE_VLLM_FAIL": "operator torchvision::nms does not exist"}
    with bidikv_up(model, tmp_path, env) as (process, output):
        assert process.wait(30) == 1
    text = re.sub(r"\s+", " ", output.read_text())
    # Both engines die; which is noticed first is chance.
    assert re.search(r"error: (prefill|decode)-0 ended with exit code 1", text)
    assert "pip uninstall -y torchvision torchaudio torchcodec" in text
    assert "operator torchvision::nms does not exist" in text
    assert "Traceback" not in text
    assert descendants(tmp_path / "logs", model) == []
