"""A vLLM lookalike: an ASGI app that speaks OpenAI's endpoints and `kv_transfer_params`, and fails on request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CHAT_EVENTS = (
    b'data: {"id":"c1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"Hello"}}]}\n\n',
    b'data: {"id":"c1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)
CHAT_ANSWER = (
    b'{"id":"c1","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":9},"kv_transfer_params":null}'
)


@dataclass(frozen=True)
class Seen:
    """One request that reached the engine."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def params(self) -> dict[str, Any] | None:
        params = self.body.get("kv_transfer_params")
        return params if isinstance(params, dict) else None

    @property
    def ours(self) -> dict[str, Any]:
        return (self.params or {}).get("bidikv", {})


@dataclass(frozen=True)
class Failure:
    """How the next request goes wrong.

    Attributes:
        status: Answer with this status and `body`.
        hang: Say nothing until the peer leaves.
        cut_after: Close the connection after that many chunks of the body.
        end_after: End the body properly, but after that many chunks only.
        dies: Call the engine's `death` instead of going on: `before` the first byte, or `mid` body.
        headers: Of an answer with another status than 200.
    """

    status: int = 200
    body: bytes = b'{"error":{"message":"broken engine","type":"server_error","code":500}}'
    hang: bool = False
    cut_after: int | None = None
    end_after: int | None = None
    dies: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


def echo_of(body: dict[str, Any]) -> str:
    """What an echoing engine answers to a chat: it depends on every message."""
    return " ".join(f"{len(body['messages'])}:{message['content']}" for message in body["messages"])


@dataclass
class FakeEngine:
    """Both roles in one: a request with `do_remote_decode` is a prefill leg, any other one is answered.

    Attributes:
        name: Makes handles tell their engine.
        healthy: What `GET /health` says.
        index_lines: Extra lines of `GET /metrics`.
        account: What the prefill leg tells about reuse; None tells nothing, like a stock engine.
        with_handle: The prefill leg offers something to pull.
        pull_s: What a prefill leg takes longer that may read back.
        token_ids: What the prefill leg says the prompt's tokens are, where it is asked; None says nothing.
        events: Chunks of a streamed answer.
        answer: Body of a whole answer.
        echo: Answer with `echo_of` the request instead.
        death: What happens when it dies.
        gate: Waited for after chunk number `gate_at` of every answer.
        seen: Every POST, in order.
        asked: Path and query of every GET of a response.
        aborted: How many requests were left by their peer before the end.
        failures: How the next POSTs go wrong; None lets one pass.
    """

    name: str = "engine"
    healthy: bool = True
    index_lines: str = ""
    account: dict[str, Any] | None = field(
        default_factory=lambda: {
            "v": 1, "reason": "hit", "prompt_tokens": 100, "remote_tokens": 64, "local_tokens": 16,
            "computed_tokens": 20, "diverged_at_token": None,
        }
    )  # fmt: skip
    with_handle: bool = True
    pull_s: float = 0.0
    token_ids: list[int] | None = field(default_factory=lambda: [11, 22, 33])
    events: tuple[bytes, ...] = CHAT_EVENTS
    answer: bytes = CHAT_ANSWER
    echo: bool = False
    death: Callable[[], Awaitable[None]] | None = None
    gate: asyncio.Event | None = None
    gate_at: int = 0
    seen: list[Seen] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    aborted: int = 0
    failures: deque[Failure | None] = field(default_factory=deque)
    _ids: Any = field(default_factory=itertools.count)

    def publish_index(self, engine_id: str, *addresses: str) -> None:
        """Publish retention indexes, one per data-parallel rank, after some other metrics."""
        self.index_lines = "vllm:num_requests_running 0.0\n# TYPE bidikv:index_info gauge\n" + "".join(
            f'bidikv:index_info{{address="{address}",engine="{rank}",engine_id="{engine_id}-{rank}"}} 1.0\n'
            for rank, address in enumerate(addresses)
        )

    @property
    def answered(self) -> list[Seen]:
        return [seen for seen in self.seen if not (seen.params or {}).get("do_remote_decode")]

    @property
    def prefilled(self) -> list[Seen]:
        return [seen for seen in self.seen if (seen.params or {}).get("do_remote_decode")]

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["method"] == "GET":
            await self._get(scope["path"], scope["query_string"].decode(), send)
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            await _whole(
                send, 400, b'{"error":{"message":"not an object","type":"x","param":null,"code":400}}'
            )
            return
        seen = Seen(scope["path"], headers, body)
        self.seen.append(seen)
        failure = self.failures.popleft() if self.failures else None
        work = asyncio.ensure_future(self._post(seen, failure or Failure(), send))
        gone = asyncio.ensure_future(_gone(receive))
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self.aborted += 1
        for task in (work, gone):
            task.cancel()
        _, pending = await asyncio.wait((work, gone))
        assert not pending
        if not work.cancelled() and work.exception() is not None:
            raise work.exception()

    async def _get(self, path: str, query: str, send) -> None:
        if path == "/health":
            await _whole(send, 200 if self.healthy else 503, b"")
        elif path == "/metrics":
            await _whole(send, 200, self.index_lines.encode(), b"text/plain")
        elif path.startswith("/v1/responses/"):
            self.asked.append(f"{path}?{query}" if query else path)
            if "stream=true" in query:
                await self._body(send, b"text/event-stream; charset=utf-8", self.events, Failure())
            else:
                await _whole(send, 200, self.answer)
        else:
            await _whole(send, 200, b'{"object": "list",  "data": []}')

    async def _post(self, seen: Seen, failure: Failure, send) -> None:
        if failure.hang:
            await asyncio.Event().wait()
        if failure.dies == "before":
            await self._die()
        if failure.status != 200:
            await _whole(send, failure.status, failure.body, headers=failure.headers)
        elif (seen.params or {}).get("do_remote_decode"):
            if seen.ours.get("sources"):
                await asyncio.sleep(self.pull_s)
            await self._body(send, b"application/json", (json.dumps(self._prefill(seen)).encode(),), failure)
        elif seen.body.get("stream"):
            events = echo_events(echo_of(seen.body)) if self.echo else self.events
            await self._body(send, b"text/event-stream; charset=utf-8", events, failure)
        else:
            answer = echo_answer(echo_of(seen.body)) if self.echo else self.answer
            await self._body(send, b"application/json", (answer,), failure)

    async def _die(self) -> None:
        assert self.death is not None
        await self.death()
        await asyncio.Event().wait()

    def _prefill(self, seen: Seen) -> dict[str, Any]:
        handle = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.name,
            "remote_block_ids": [[1, 2, 3]], "remote_request_id": f"{self.name}-{next(self._ids)}",
        }  # fmt: skip
        params: dict[str, Any] | None = handle if self.with_handle else None
        if params is not None and self.account is not None:
            params["bidikv"] = dict(self.account)
            if seen.ours.get("return_token_ids") and self.token_ids is not None:
                params["bidikv"]["prompt_token_ids"] = self.token_ids
        answer = {"id": "p", "choices": [], "usage": {"prompt_tokens": 77}, "kv_transfer_params": params}
        if seen.body.get("return_token_ids") and self.token_ids is not None:
            if seen.path == "/v1/completions":
                answer["choices"] = [{"index": 0, "text": "x", "prompt_token_ids": self.token_ids}]
            else:
                answer["prompt_token_ids"] = self.token_ids
        return answer

    async def _body(self, send, content_type: bytes, chunks: tuple[bytes, ...], failure: Failure) -> None:
        headers = [(b"content-type", content_type), (b"x-engine", self.name.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if failure.dies == "mid":
            first = chunks[0] if len(chunks) > 1 else chunks[0][: len(chunks[0]) // 2]
            await send({"type": "http.response.body", "body": first, "more_body": True})
            await self._die()
        for number, chunk in enumerate(chunks):
            if number == failure.cut_after:
                raise ConnectionAbortedError("cut on request")
            if number == failure.end_after:
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if number == self.gate_at and self.gate is not None:
                await self.gate.wait()
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def echo_events(text: str) -> tuple[bytes, ...]:
    """A stream whose content is this text, a word at a time."""
    deltas = [{"content": word} for word in text.replace(" ", "\0 ").split("\0")]
    choices = [{"index": 0, "delta": delta} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [
        b"data: " + json.dumps({"id": "c1", "choices": [choice]}).encode() + b"\n\n" for choice in choices
    ]
    return (*events, b"data: [DONE]\n\n")


def echo_answer(text: str) -> bytes:
    """A whole answer whose content is this text."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "c1", "choices": [choice], "kv_transfer_params": None}).encode()


async def _whole(
    send,
    status: int,
    body: bytes,
    content_type: bytes = b"application/json",
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    started = {"type": "http.response.start", "status": status}
    await send({**started, "headers": [(b"content-type", content_type), *headers]})
    await send({"type": "http.response.body", "body": body})


class _Server(uvicorn.Server):
    """A server that leaves the test process's signals alone and stops as soon as it is told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(
    *apps, lifespan: str = "off", host: str = "127.0.0.1", port: int = 0, **uvicorn_options: Any
):
    """Run ASGI apps on loopback, on free ports unless one is given; yields their base URLs."""
    scheme = "https" if "ssl_certfile" in uvicorn_options else "http"
    with contextlib.ExitStack() as stack:
        servers, tasks, urls = [], [], []
        for app in apps:
            sock = stack.enter_context(socket.socket(proto=socket.IPPROTO_TCP))
            sock.bind((host, port))
            urls.append(f"{scheme}://{host}:{sock.getsockname()[1]}")
            config = uvicorn.Config(
                app,
                log_config=None,
                lifespan=lifespan,
                http="httptools",
                ws="none",
                timeout_graceful_shutdown=1,
                **uvicorn_options,
            )
            servers.append(_Server(config))
            tasks.append(asyncio.ensure_future(servers[-1].serve(sockets=[sock])))
        try:
            await eventually(lambda: all(s.started for s in servers) or any(t.done() for t in tasks))
            yield urls
        finally:
            for server in servers:
                server.stop.set()
            await asyncio.gather(*tasks)


class Host:
    """An address at which one application can die and come back.

    Attributes:
        url: Its base URL, always the same.
    """

    def __init__(self, app) -> None:
        self._app = app
        self._port = 0
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._tasks: list[asyncio.Future[None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def is_up(self) -> bool:
        """Whether it listens."""
        return self._server is not None and self._server.started

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", self._port))
        self._port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            lifespan="off",
            http="httptools",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = server = _Server(config)
        self._tasks.append(asyncio.ensure_future(server.serve(sockets=[self._socket])))
        await eventually(lambda: server.started)

    async def die(self) -> None:
        """Cut every connection and listen no more. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        self._socket.close()
        server.stop.set()

    async def restart(self) -> None:
        """Die and come back at once."""
        await self.die()
        await self.start()

    async def close(self) -> None:
        """Die for good."""
        await self.die()
        await asyncio.gather(*self._tasks)


async def eventually(condition, *, within_s: float = 5.0) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError("the condition did not come true in time")
        await asyncio.sleep(0.005)
