"""The systems under test as processes on this machine: two engines, and in front of them one router of each kind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS: Final[dict[str, dict[str, str]]] = {
    "bidikv": {},
    "bidikv-poll": {"BIDIKV_ROUTER_BUSY_POLL_S": "0.002"},
}
"""Our router, and with which settings."""
NAMES: Final = ("direct", *OURS, "vllm-router", "litellm")
PACKAGES: Final = {"vllm-router": "vllm-router==0.1.17", "litellm": "litellm[proxy]==1.106.12"}
_HERE: Final = Path(__file__).parent
_START_S: Final = 90.0
_QUIET: Final = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "RUST_LOG": "error"}


class SystemFailedError(RuntimeError):
    """A system cannot be installed or started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class System:
    """One way from a client to the engines.

    Attributes:
        name: One of `NAMES`.
        ports: Where clients go: a router's port, or prefill's and decode's.
        process: The router; None for the direct way.
    """

    name: str
    ports: tuple[int, ...]
    process: psutil.Process | None

    def cpu_s(self) -> float:
        """Processor time of the router so far, its children included."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def memory_mib(self) -> float:
        """What the router holds, its children included."""
        return sum(process.memory_info().rss for process in self._processes()) / 2**20

    def _processes(self) -> list[psutil.Process]:
        return [] if self.process is None else [self.process, *self.process.children(recursive=True)]


class Bench:
    """Starts and ends the processes of one run, and keeps what they write in a folder."""

    def __init__(self, folder: Path, venvs: Path) -> None:
        self._folder = folder
        self._venvs = venvs
        self._stack = contextlib.ExitStack()
        self.engines: tuple[int, int] = (0, 0)
        self.engine_processes: list[psutil.Process] = []

    def __enter__(self) -> Self:
        """Start the engines."""
        self.engines = (self._engine("prefill"), self._engine("decode"))
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self._stack.close()

    def start(self, name: str) -> System:
        """Start a router, installing it first where it is not ours.

        Raises:
            SystemFailedError: It does not come up.
        """
        prefill, decode = (f"http://127.0.0.1:{port}" for port in self.engines)
        if name == "direct":
            return System(name, self.engines, None)
        port = free_port()
        if name in OURS:
            command = [sys.executable, "-m", "bidikv_server.cli", "router", "--prefill", prefill]
            command += ["--decode", decode, "--port", str(port)]
        elif name == "vllm-router":
            command = [self._program(name, "vllm-router"), "--vllm-pd-disaggregation", "--prefill", prefill]
            command += [
                "--decode",
                decode,
                "--port",
                str(port),
                "--log-level",
                "error",
                "--policy",
                "round_robin",
            ]
            command += ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
        else:
            config = self._folder / "litellm.yaml"
            model = {"model": "hosted_vllm/m", "api_base": f"{decode}/v1", "api_key": "none"}
            # JSON is YAML.
            general = {"dangerously_permit_weak_or_unset_master_key": True}
            models = [{"model_name": "m", "litellm_params": model}]
            config.write_text(json.dumps({"model_list": models, "general_settings": general}))
            command = [self._program(name, "litellm"), "--config", str(config), "--port", str(port)]
            command += ["--host", "127.0.0.1", "--num_workers", "1"]
        process = self._spawn(name, command)
        _await_port(name, process, port, self._folder / f"{name}.log")
        _await_answer(name, port)
        return System(name, (port,), psutil.Process(process.pid))

    def _engine(self, role: str) -> int:
        port = free_port()
        process = self._spawn(role, [sys.executable, "-m", "overhead.engine", "--port", str(port)])
        _await_port(role, process, port, self._folder / f"{role}.log")
        self.engine_processes.append(psutil.Process(process.pid))
        return port

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        paths = [str(_HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**os.environ, **_QUIET, **OURS.get(name, {})}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if name in PACKAGES:
            del environment["PYTHONPATH"]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self._folder)
        self._stack.callback(_end, process)
        return process

    def _program(self, name: str, program: str) -> str:
        """A program of a package that has a virtual environment of its own, made the first time."""
        home = self._venvs / name
        path = home / "bin" / program
        if not path.exists():
            package = PACKAGES[name]
            print(f"installing {package} into {home}", file=sys.stderr, flush=True)
            venv.create(home, with_pip=True, clear=True)
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", package]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemFailedError(
                    f"{package} cannot be installed ({_last_line(done.stderr)}): leave it out with --without {name}"
                )
        return str(path)


def set_pace(port: int, interval_s: float) -> None:
    """Tell an engine how far apart its events are."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("POST", f"/pace/{interval_s}", body=b"{}")
        connection.getresponse().read()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listen_times() -> Iterator[float]:
    """Moments at which to look again whether a process is there, until it is time to give up."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        yield time.monotonic()
        time.sleep(0.1)


def _await_port(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in listen_times():
        if process.poll() is not None:
            raise SystemFailedError(f"{name} ended with {process.returncode}: {_last_line(log.read_text())}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
    raise SystemFailedError(f"{name} does not listen after {_START_S:g} s")


def _await_answer(name: str, port: int) -> None:
    """Wait for a first turn to succeed: some load half of themselves only then, or have to find their engines."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})
    said = ""
    for _ in listen_times():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body=body, headers=headers)
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace")
            if answer.status == 200:
                return
    raise SystemFailedError(f"{name} answers no turn: {said[:300]}")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    family = [process.pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in family[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
