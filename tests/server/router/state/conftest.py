"""A real state server, and stores that share it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry
from state_server import PROGRAMS, StateProcess

from bidikv_server.router.core.conversations import ConversationTable
from bidikv_server.router.core.digests import chain
from bidikv_server.router.core.history import History
from bidikv_server.router.core.ids import Scope
from bidikv_server.router.settings import RouterSettings
from bidikv_server.router.state.create import create_store

if TYPE_CHECKING:
    from bidikv_server.router.state.shared import SharedStore

SCOPE = Scope(tenant="t", model="m")


@pytest.fixture(scope="session")
def programs():
    assert PROGRAMS, "no Redis or Valkey server on PATH: run scripts/services.sh redis"
    return PROGRAMS


@pytest.fixture(scope="session")
def one_server(programs, tmp_path_factory):
    """One process for all tests that leave it as it is."""
    process = StateProcess(tmp_path_factory.mktemp("state"), programs[0])
    process.start()
    yield process
    process.kill()


@pytest.fixture
def server(one_server):
    """A running server that is empty."""
    one_server.client().flushall()
    one_server.client().script_flush()
    return one_server


@pytest.fixture
def processes(programs, tmp_path):
    """A function that starts a server of the test's own, which it may kill."""
    with contextlib.ExitStack() as stack:

        def _start(*options: str, program: str = programs[0], running: bool = True) -> StateProcess:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            process = StateProcess(folder, program, options)
            if running:
                process.start()
            stack.callback(process.kill)
            return process

        yield _start


@dataclass
class Router:
    """The state of one router."""

    store: SharedStore
    table: ConversationTable
    history: History
    registry: CollectorRegistry
    fake_s: list[float] = field(default_factory=lambda: [1e9])

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"bidikv_router_state_{name}", labels) or 0.0

    @property
    def up(self) -> bool:
        return self.metric("up") == 1


def make_router(url: str, clock=None, **given) -> Router:
    """A router's store with these settings, not opened yet."""
    # Patient, so that a busy machine does not look like a server that is away.
    given = {"state_timeout_s": 5.0, **given}
    settings = RouterSettings(prefill=("http://p",), decode=("http://d",), state_url=url, **given)
    bounds = {"max_conversations": settings.max_conversations, "idle_s": settings.conversation_idle_s}
    table = ConversationTable(max_turns=settings.max_turns, **bounds)
    history = History(max_records=settings.max_records, **bounds)
    registry = CollectorRegistry()
    fake_s = [1e9]
    store = create_store(settings, table, history, clock or (lambda: fake_s[0]), registry)
    return Router(store, table, history, registry, fake_s)


@pytest.fixture
async def routers(anyio_backend):
    """A function that opens a router's store at a URL."""
    async with contextlib.AsyncExitStack() as stack:

        async def _open(url: str, **given) -> Router:
            router = make_router(url, **given)
            await router.store.open()
            stack.push_async_callback(router.store.close)
            return router

        yield _open


def prompt(*contents: str, scope: Scope = SCOPE):
    return chain({"messages": [{"role": "user", "content": content} for content in contents]}, scope)
