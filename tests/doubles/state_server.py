"""A real Redis or Valkey server on a free port, and a proxy in front of it that can hang or be cut."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import redis

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROGRAMS = tuple(found for name in ("redis-server", "valkey-server") if (found := shutil.which(name)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class StateProcess:
    """One server process, which can be killed and started again, empty, at the same address."""

    folder: Path
    program: str
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    _clients: list[redis.Redis] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A client of the server, the same one each time."""
        if not self._clients:
            self._clients.append(redis.Redis(port=self.port))
        return self._clients[0]

    def start(self) -> None:
        command = [
            self.program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no",
            "--dir", str(self.folder), *self.options,
        ]  # fmt: skip
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + 10
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
                assert time.monotonic() < deadline_s
                time.sleep(0.01)

    def kill(self) -> None:
        for client in self._clients:
            client.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Proxy:
    """Passes bytes on to a port, until it is told to hang: then it takes connections and bytes and says nothing."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.held = 0
        self.port = 0

    def hang(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.flow()
            self.cut()
            if self._serving:
                await asyncio.wait(self._serving)

    def cut(self) -> None:
        """Break all connections."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            inside_reader, inside_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(inside_writer)
            ways = [(reader, inside_writer), (inside_reader, writer)]
            await asyncio.gather(*(self._pass(*way) for way in ways), return_exceptions=True)
            self._writers.discard(inside_writer)
            inside_writer.close()
        self._writers.discard(writer)
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.held += not self._flowing.is_set()
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
