"""A whole deployment on one machine: prefill engines, decode engines and a router, started and ended together."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bidikv_server.launch import readiness
from bidikv_server.launch.errors import StartTimeoutError
from bidikv_server.launch.machine import core_count, find_tcmalloc, vllm_platform
from bidikv_server.launch.model import check_model_path, read_card
from bidikv_server.launch.ports import free_ports, http_url, require_free
from bidikv_server.launch.process import Child, Children, ChildSpec
from bidikv_server.launch.recipe import EngineSpec, ReuseSettings, Role, engine_command
from bidikv_server.wire import SECRET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

_POLL_S: Final = 0.25
_PROGRESS_S: Final = 5.0
_ROUTER_GRACE_S: Final = "2"


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start.

    Attributes:
        model: Checkpoint folder.
        prefill: Number of prefill engines.
        decode: Number of decode engines.
        host: The address that everything binds to.
        port: The router's port; None takes a free one.
        readback: Off serves like stock vLLM: nothing is retained and nothing read back.
        reuse: How much is reused.
        served_model_name: What clients call the model; the folder's name by default.
        prefill_prefix_caching: Prefill's own prefix cache; None leaves vLLM's default.
        engine_args: Passed to every engine's vLLM as they are.
        prefill_args: Passed to prefill engines' vLLM after those.
        decode_args: Passed to decode engines' vLLM after those.
        engine_env: Variables for every engine, over the caller's environment.
        router_args: Passed to `bidikv router` as they are.
        log_dir: Where each process writes its log; None makes a temporary folder, which stays.
        start_timeout_s: How long all engines together may take to start.
    """

    model: Path
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"
    port: int | None = None
    readback: bool = True
    reuse: ReuseSettings = field(default_factory=ReuseSettings)
    served_model_name: str | None = None
    prefill_prefix_caching: bool | None = None
    engine_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    engine_env: Mapping[str, str] = field(default_factory=dict)
    router_args: tuple[str, ...] = ()
    log_dir: Path | None = None
    start_timeout_s: float = 300.0


def plan_engines(spec: ClusterSpec, ports: list[int], template: EngineSpec) -> dict[str, EngineSpec]:
    """Give every engine a name, a role and three of the ports."""
    roles: list[tuple[Role, int]] = [("prefill", n) for n in range(spec.prefill)]
    roles += [("decode", n) for n in range(spec.decode)]
    engines = {}
    for (role, number), first in zip(roles, range(0, len(ports), 3), strict=True):
        port, nixl_port, index_port = ports[first : first + 3]
        caching = spec.prefill_prefix_caching if role == "prefill" else None
        own_args = spec.prefill_args if role == "prefill" else spec.decode_args
        engines[f"{role}-{number}"] = replace(
            template,
            role=role,
            port=port,
            nixl_port=nixl_port,
            index_port=index_port,
            prefix_caching=caching,
            extra_args=template.extra_args + own_args,
        )
    return engines


class Cluster:
    """Engines and a router that live as long as the `with` block."""

    def __init__(self, spec: ClusterSpec, progress: Callable[[str], None] = lambda _: None) -> None:
        self.spec = spec
        self.log_dir = spec.log_dir or Path(tempfile.gettempdir()) / f"bidikv-{secrets.token_hex(4)}"
        self.secret = secrets.token_urlsafe(24)
        """What the side channels of this cluster's engines share."""
        self._progress = progress
        self._stack = ExitStack()
        self._engines: dict[str, EngineSpec] = {}
        self._running: dict[str, Child] = {}
        self._port = spec.port or 0

    def __enter__(self) -> Self:
        """Start everything and wait until it serves.

        Raises:
            LaunchError: Something cannot start; whatever had started is ended.
        """
        self._plan()
        with ExitStack() as stack:
            self._children = stack.enter_context(Children())
            self._start_engines(self._engines)
            self._start_router()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End everything."""
        self._stack.close()

    @property
    def router_url(self) -> str:
        """The router's address."""
        return http_url(self.spec.host, self._port)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as `base_url`."""
        return f"{self.router_url}/v1"

    @property
    def model_name(self) -> str:
        """What clients put into `model`."""
        return self.spec.served_model_name or self.spec.model.name

    @property
    def prefill_urls(self) -> list[str]:
        """Addresses of the prefill engines."""
        return self._urls("prefill")

    @property
    def decode_urls(self) -> list[str]:
        """Addresses of the decode engines."""
        return self._urls("decode")

    def group_of(self, name: str) -> int:
        """Process group of a member: `prefill-0`, `decode-0`, `router`."""
        return self._running[name].pid

    def pids(self) -> list[int]:
        """Every process of the cluster that lives now."""
        return self._children.pids()

    def raise_if_dead(self) -> None:
        """Do nothing while all of it runs.

        Raises:
            ChildDiedError: An engine or the router ended.
        """
        for child in self._running.values():
            child.raise_if_dead()

    def restart_prefill(self, *, prefix_caching: bool | None = None) -> None:
        """Replace every prefill engine by a fresh one on the same ports, and wait until the router uses it.

        Args:
            prefix_caching: Prefill's own prefix cache from now on; None leaves vLLM's default.

        Raises:
            LaunchError: One of them does not start again.
        """
        names = [name for name, engine in self._engines.items() if engine.role == "prefill"]
        self._children.stop([self._running.pop(name) for name in names])
        for name in names:
            self._engines[name] = replace(self._engines[name], prefix_caching=prefix_caching)
        self._start_engines({name: self._engines[name] for name in names})
        self._wait({"router": self._router_is_ready})

    def members(self) -> list[str]:
        """Names of everything that can be killed and restarted."""
        return [*self._engines, "router"]

    def kill(self, name: str) -> None:
        """End a member and all its processes with SIGKILL, as a crash would. Does nothing if it is down."""
        child = self._running.pop(name, None)
        if child is not None:
            self._children.kill(child)

    def restart(self, name: str) -> None:
        """Replace a member by a fresh one on the same ports, and wait until the router uses it.

        An engine comes back under another engine id. What still runs is killed.

        Raises:
            LaunchError: It does not start again.
        """
        self.kill(name)
        if name == "router":
            self._start_router()
            return
        self._start_engines({name: self._engines[name]})
        if "router" in self._running:
            self._wait({"router": self._router_is_ready})

    def _plan(self) -> None:
        spec = self.spec
        model = check_model_path(spec.model)
        if spec.port is not None:
            require_free(spec.host, spec.port)
        ports = free_ports(3 * (spec.prefill + spec.decode) + 1, spec.host)
        spare = ports.pop()
        self._port = self._port or spare
        template = EngineSpec(
            "prefill",
            model,
            0,
            0,
            0,
            vllm_platform(),
            card=read_card(model),
            readback=spec.readback,
            reuse=spec.reuse,
            secret=self.secret,
            served_model_name=spec.served_model_name,
            tcmalloc=find_tcmalloc(),
            cpu_threads=core_count(),
            host=spec.host,
            extra_args=spec.engine_args,
        )
        self._engines = plan_engines(spec, ports, template)

    def _start_engines(self, engines: Mapping[str, EngineSpec]) -> None:
        for name, engine in engines.items():
            command = engine_command(engine)
            env = command.environment(os.environ) | dict(self.spec.engine_env)
            self._start(name, command.argv, env)
        self._wait({name: partial(_engine_is_ready, engine) for name, engine in engines.items()})

    def _start_router(self) -> None:
        argv = [sys.executable, "-m", "bidikv_server.cli", "router", "--host", self.spec.host]
        argv += ["--port", str(self._port)]
        for role, urls in (("prefill", self.prefill_urls), ("decode", self.decode_urls)):
            argv += [word for url in urls for word in (f"--{role}", url)]
        argv += [] if self.spec.readback else ["--no-readback"]
        # The engines' secret too: without it no index hears the router, which then can neither release nor renew.
        own = {"BIDIKV_ROUTER_SHUTDOWN_GRACE_S": _ROUTER_GRACE_S, SECRET_VARIABLE: self.secret}
        env = {**os.environ, **own}
        self._start("router", (*argv, *self.spec.router_args), env)
        self._wait({"router": self._router_is_ready})

    def _start(self, name: str, argv: tuple[str, ...], env: dict[str, str]) -> None:
        self._running[name] = self._children.start(ChildSpec(name, argv, env, self.log_dir / f"{name}.log"))

    def _wait(self, checks: dict[str, Callable[[], bool]]) -> None:
        """Wait until every check holds; fail at once when a process dies."""
        started_s = told_s = time.monotonic()
        waiting = dict(checks)
        while True:
            self.raise_if_dead()
            waiting = {name: ready for name, ready in waiting.items() if not ready()}
            now_s = time.monotonic()
            if not waiting:
                self._progress(f"{', '.join(checks)} ready after {now_s - started_s:.0f} s")
                return
            if now_s - started_s > self.spec.start_timeout_s:
                raise StartTimeoutError(self._describe_timeout(list(waiting)))
            if now_s - told_s >= _PROGRESS_S:
                told_s = now_s
                self._progress(f"waiting for {', '.join(waiting)} ({now_s - started_s:.0f} s)")
            time.sleep(_POLL_S)

    def _router_is_ready(self) -> bool:
        indexes = self.spec.decode if self.spec.readback else 0
        return readiness.router_is_ready(self.router_url, len(self._engines), indexes)

    def _describe_timeout(self, waiting: list[str]) -> str:
        child = self._running[waiting[0]]
        return (
            f"{', '.join(waiting)} not ready after {self.spec.start_timeout_s:.0f} s. "
            f"Last lines of {child.spec.log_path}:\n{child.log_tail()}"
        )

    def _urls(self, role: Role) -> list[str]:
        return [_url(engine) for engine in self._engines.values() if engine.role == role]


def _url(engine: EngineSpec) -> str:
    return http_url(engine.host, engine.port)


def _engine_is_ready(engine: EngineSpec) -> bool:
    if not readiness.is_healthy(_url(engine)):
        return False
    return (
        engine.role == "prefill" or not engine.readback or readiness.index_address(_url(engine)) is not None
    )
