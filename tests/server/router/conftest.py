"""Engines, a router in front of them and a client, all on loopback."""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "doubles"))

from fake_engine import FakeEngine, serving

from bidikv_server.connector.core import digests
from bidikv_server.connector.index_service import IndexService
from bidikv_server.connector.side_channel import Server
from bidikv_server.router.app import RouterApp, create_app
from bidikv_server.router.settings import RouterSettings


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Cluster:
    """Running engines and router."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    urls: dict[str, str]
    app: RouterApp
    client: httpx2.AsyncClient

    async def chat(self, *contents: str, headers: dict[str, str] | None = None, **fields: Any):
        """Post a chat whose messages alternate between user and assistant."""
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": content}
            for number, content in enumerate(contents)
        ]
        body = {"model": "m", "messages": messages, **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def probe(self) -> None:
        """Let the router look at its engines now."""
        await self.app._prober.probe_all()


@pytest.fixture
async def start(anyio_backend):
    """A function that starts a cluster of so many engines, with these router settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def _start(
            prefill: int = 1,
            decode: int = 1,
            decode_before: tuple[str, ...] = (),
            kind: type[FakeEngine] = FakeEngine,
            **settings: Any,
        ) -> Cluster:
            engines = [kind(f"prefill-{number}") for number in range(prefill)]
            engines += [kind(f"decode-{number}") for number in range(decode)]
            for number, engine in enumerate(engines[prefill:]):
                engine.publish_index(f"id-{number}", f"10.0.0.{number}:7000")
            urls = await stack.enter_async_context(serving(*engines))
            # What depends on the engines' addresses is given as a function of them.
            settings = {name: value(urls) if callable(value) else value for name, value in settings.items()}
            app = create_app(
                RouterSettings(
                    prefill=tuple(urls[:prefill]),
                    decode=(*decode_before, *urls[prefill:]),
                    # A probe that takes long on a busy machine is no engine that is down, or unknown.
                    **{
                        "probe_interval_s": 600.0,
                        "probe_failures": 1,
                        "probe_timeout_s": 30.0,
                        **settings,
                    },
                )
            )
            (url,) = await stack.enter_async_context(serving(app, lifespan="on"))
            client = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=10.0))
            named = {engine.name: url for engine, url in zip(engines, urls, strict=True)}
            return Cluster(engines[:prefill], engines[prefill:], named, app, client)

        yield _start


@pytest.fixture
def serve_index():
    """A function that answers side-channel messages on a free address, which it returns."""
    with contextlib.ExitStack() as stack:

        def _serve(handle, shared: str = "shared") -> str:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            stack.callback(Server(address, handle, secret=shared).close)
            return address

        yield _serve


@pytest.fixture
def holding():
    """A function that makes a retention index, which holds this conversation if one is named."""

    def _holding(conversation: str | None = None) -> IndexService:
        connection = {"engine_id": "e", "host": "h", "port": 1, "tp_size": 1, "dcp_size": 1, "pp_size": 1}
        index = IndexService("identity", connection, 64)
        if conversation is not None:
            chain = digests.chain(b"seed", range(32), block_size=4, blocks=8)
            index.retain(conversation, chain, range(8), ttl_s=480.0)
        return index

    return _holding
