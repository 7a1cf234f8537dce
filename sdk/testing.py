"""A router in memory for the tests of agents: scripted answers, real accounts of reuse, and everything that was asked.

Needs no engine, no network and no test framework. Tokens are counted as four characters each.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import openai

from bidikv import _fake_responses
from bidikv._fake_answers import (
    EVENTS,
    JSON,
    completion_stream,
    dump,
    error_reply,
    event_stream,
    finish_reason,
    frame,
    json_reply,
)
from bidikv._fake_decode import FakeDecode
from bidikv.client import AsyncOpenAI, OpenAI
from bidikv.headers import (
    KEY_HEADER,
    READBACK_HEADER,
    REUSE_HEADER,
    SESSION_HEADER,
    TURN_HEADER,
    TurnHeader,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

_OWN: Final = "/v1/bidikv/conversations/"


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it reached the router.

    Attributes:
        method: In capitals.
        path: Without the query.
        headers: By lower-case name.
        body: Parsed; None without one.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any

    @property
    def session(self) -> str | None:
        """Wire id of the conversation."""
        return self.headers.get(SESSION_HEADER.lower())

    @property
    def turn(self) -> TurnHeader:
        """What the client said of the turn."""
        return TurnHeader.parse(self.headers.get(TURN_HEADER))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a scripted answer.

    Attributes:
        name: The tool.
        arguments: Raw JSON, as a model writes it.
        id: Of the call; made up without one.
    """

    name: str
    arguments: str = "{}"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class _Script:
    text: str | None = None
    calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    status: int = 200
    retry_after_s: float | None = None
    breaks: bool = False


class FakeRouter:
    """Answers chat completions, responses and models as a bidikv router does.

    Accounts of reuse are computed from what is sent: a turn that extends its conversation's last one is a `hit`, one whose
    history changed is `hit_diverged`.

    Attributes:
        text: The answer where none is scripted.
        requests: What was asked, in order: generations only.
        told: What was asked of conversations (explained, released, waits), in order.
        held: Wire ids or, without one, names of the conversations that decode holds.
    """

    def __init__(self, text: str = "It is a fake router.") -> None:
        self.text = text
        self.requests: list[Received] = []
        self.told: list[Received] = []
        self._script: deque[_Script] = deque()
        self._decode = FakeDecode()
        self._responses: set[str] = set()
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def held(self) -> tuple[str, ...]:
        """Conversations that decode holds."""
        return self._decode.held

    @property
    def sessions(self) -> list[str | None]:
        """The conversation that each generation named."""
        return [request.session for request in self.requests]

    def reply(
        self, text: str | None = None, *, tool_calls: Sequence[ToolCall] = (), reasoning: str | None = None
    ) -> None:
        """Script the next answer; further ones follow it.

        Args:
            text: Of the answer; None is null, as beside tool calls.
            tool_calls: The model's.
            reasoning: The model's.
        """
        self._script.append(_Script(text, tool_calls, reasoning))

    def fail(self, status: int = 503, *, times: int = 1, retry_after_s: float | None = None) -> None:
        """Let the next generations fail.

        Args:
            status: Of the answer.
            times: How many.
            retry_after_s: Sent as `Retry-After`, in seconds.
        """
        self._script.extend([_Script(status=status, retry_after_s=retry_after_s)] * times)

    def break_stream(self) -> None:
        """Let the next stream end with an error event after its first text."""
        self._script.append(_Script(self.text, breaks=True))

    def options(self, *, asynchronous: bool = False) -> dict[str, Any]:
        """Arguments that make a client one of this router. No socket is opened.

        Args:
            asynchronous: For an asynchronous client.
        """
        http = _http()
        kind = http.AsyncClient if asynchronous else http.Client
        http_client = kind(transport=self.transport())
        return {"base_url": "http://router/v1", "api_key": "fake", "http_client": http_client}

    def client(self, **options: Any) -> OpenAI:
        """A client of this router.

        Args:
            options: As for `bidikv.OpenAI`.
        """
        return OpenAI(**{**self.options(), **options})

    def async_client(self, **options: Any) -> AsyncOpenAI:
        """An asynchronous client of this router.

        Args:
            options: As for `bidikv.AsyncOpenAI`.
        """
        return AsyncOpenAI(**{**self.options(asynchronous=True), **options})

    def transport(self) -> Any:
        """A transport of the HTTP library of the OpenAI client, for clients that are made elsewhere."""
        http = _http()

        def handle(request: Any) -> Any:
            headers = {name.lower(): value for name, value in request.headers.items()}
            status, told, content = self.answer(request.method, request.url.path, headers, request.read())
            return http.Response(status, headers=told, content=content)

        async def handle_async(request: Any) -> Any:
            await request.aread()
            return handle(request)

        class Both(http.MockTransport):  # type: ignore[misc, name-defined] # whichever library it is
            async def handle_async_request(self, request: Any) -> Any:
                return await handle_async(request)

        return Both(handle)

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Answer on a free loopback port meanwhile; yields the base URL, with `/v1`."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], raw: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Answer one request: status, headers, body.

        Args:
            method: In capitals.
            path: Without the query.
            headers: By lower-case name.
            raw: The body.
        """
        request = Received(method, path, dict(headers), json.loads(raw) if raw else None)
        with self._lock:
            if path.startswith(_OWN):
                return self._own(request)
            if path.endswith("/models"):
                return json_reply(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
            if method != "POST" or not path.endswith(("/chat/completions", "/completions", "/responses")):
                return error_reply(404, f"There is no endpoint {path}.")
            return self._generate(request)

    def _generate(self, request: Received) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(request)
        script = self._script.popleft() if self._script else _Script(self.text)
        if script.status != 200:
            status, headers, body = error_reply(script.status, "The fake router fails as it was told to.")
            if script.retry_after_s is not None:
                headers["retry-after"] = f"{script.retry_after_s:g}"
            return status, headers, body
        earlier = request.body.get("previous_response_id")
        if earlier is not None and earlier not in self._responses:
            return error_reply(404, f"Response with id '{earlier}' not found.")
        message = self._message(script)
        key, reuse = self._decode.turn(
            request.session,
            request.turn,
            request.body,
            message,
            readback=request.headers.get(READBACK_HEADER) != "off",
        )
        headers = {REUSE_HEADER: reuse.format(), KEY_HEADER: key}
        return self._reply(request, script, message, reuse.prompt_tokens or 0, headers)

    def _reply(
        self,
        request: Received,
        script: _Script,
        message: dict[str, Any],
        prompt_tokens: int,
        headers: dict[str, str],
    ) -> tuple[int, dict[str, str], bytes]:
        body, streams = request.body, bool(request.body.get("stream"))
        generated = len(json.dumps(message)) // 4
        if request.path.endswith("/responses"):
            name = f"resp_fake{len(self.requests)}"
            self._responses.add(name)
            usage = _fake_responses.usage(prompt_tokens, generated)
            told = (_fake_responses.events if streams else _fake_responses.whole)(message, usage, body, name)
            return 200, headers | (EVENTS if streams else JSON), told
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        }
        chat = "/chat/" in request.path
        if streams:
            events = event_stream if chat else completion_stream
            return 200, headers | EVENTS, events(message, usage, body, breaks=script.breaks)
        choice = {"index": 0, "finish_reason": finish_reason(message)}
        choice |= {"message": message} if chat else {"text": message["content"] or "", "logprobs": None}
        kind = "chat.completion" if chat else "text_completion"
        return 200, headers | JSON, dump({**frame(kind, body), "choices": [choice], "usage": usage})

    def _message(self, script: _Script) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": script.text}
        if script.reasoning is not None:
            message["reasoning"] = script.reasoning
        calls = []
        for call in script.calls:
            self._calls += 1
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": call.id or f"call_{self._calls}", "type": "function", "function": function})
        return message | ({"tool_calls": calls} if calls else {})

    def _own(self, request: Received) -> tuple[int, dict[str, str], bytes]:
        self.told.append(request)
        key, _, action = request.path.removeprefix(_OWN).partition("/")
        held = self._decode.find(key)
        if held is None:
            return error_reply(404, f"There is no conversation {key}.")
        if action == "wait":
            held.waits_s.append(request.body["wait_s"])
            return json_reply(200, {"key": key, "wait_s": request.body["wait_s"], "decode": {}})
        if request.method == "DELETE":
            self._decode.forget(key)
            return json_reply(200, {"key": key, "forgotten": True, "decode": {}})
        return json_reply(200, {"key": key, "recent": list(reversed(held.turns))})


def _http() -> ModuleType:
    """The HTTP library that the OpenAI client speaks through: another one since its version 3."""
    return import_module("httpx" if openai.__version__.startswith("2.") else "httpx2")


def _handler(router: FakeRouter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, told, content = router.answer(self.command, self.path.partition("?")[0], headers, raw)
            self.send_response(status)
            for name, value in {**told, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - the names that the library calls

        def log_message(self, *_: Any) -> None:
            """Say nothing on stderr."""

    return Handler
