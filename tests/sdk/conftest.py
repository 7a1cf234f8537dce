"""A router that answers like the real one, in memory or on a loopback socket, and remembers what it was asked."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import openai
import pytest
from hypothesis import settings

import bidikv
from bidikv.headers import REUSE_HEADER, SESSION_HEADER, ReuseHeader

for folder in ("suites", "doubles"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
pytest.register_assert_rewrite("target", "client_suite", "langgraph_suite")

# How long an example takes says little on a shared machine.
settings.register_profile("sdk", deadline=None)
settings.load_profile("sdk")

# The OpenAI client speaks through another HTTP library since its version 3.
http = import_module("httpx" if openai.__version__.startswith("2.") else "httpx2")


class FakeRouter:
    """Answers chat completions: a named tool with its schema's first choices, or else with `text`.

    Tool arguments are spelt as no JSON library would spell them, so that a re-serialised copy is noticed.
    """

    def __init__(self):
        self.text = "It is a router."
        self.reasoning = None
        self.raw_args = None
        self.failures = []
        self.requests = []
        self._turns = Counter()
        self._calls = 0

    @staticmethod
    def response(*args, **options):
        return http.Response(*args, **options)

    @property
    def bodies(self):
        return [json.loads(request.content) for request in self.requests]

    @property
    def sessions(self):
        return [request.headers.get(SESSION_HEADER) for request in self.requests]

    def header(self, name):
        return [request.headers.get(name) for request in self.requests]

    def answer(self, request):
        self.requests.append(request)
        if self.failures:
            return http.Response(self.failures.pop(0), json={"error": {"message": "no engine"}})
        if request.url.path.endswith("/models"):
            return http.Response(200, json={"object": "list", "data": []})
        body = json.loads(request.content)
        headers = {REUSE_HEADER: self._reuse(request).format()}
        if request.url.path.endswith("/responses"):
            return http.Response(200, headers=headers, json=_RESPONSE)
        message = self._message(body)
        if body.get("stream"):
            headers["content-type"] = "text/event-stream"
            return http.Response(200, headers=headers, content=_events(message, body))
        choice = {"index": 0, "message": message, "finish_reason": "stop", "text": self.text}
        return http.Response(200, headers=headers, json=_completion("chat.completion", choice, _USAGE))

    async def answer_async(self, request):
        return self.answer(request)

    def client(self, answer=None, **options):
        http_client = http.Client(transport=http.MockTransport(answer or self.answer))
        return bidikv.OpenAI(base_url="http://router/v1", api_key="k", http_client=http_client, **options)

    def async_client(self, **options):
        http_client = http.AsyncClient(transport=http.MockTransport(self.answer_async))
        return bidikv.AsyncOpenAI(
            base_url="http://router/v1", api_key="k", http_client=http_client, **options
        )

    def _reuse(self, request):
        session = request.headers.get(SESSION_HEADER)
        self._turns[session] += 1
        if session is None or self._turns[session] == 1:
            return ReuseHeader("new_conversation", 100, 0, 0, 100)
        return ReuseHeader("hit", 100, 64, 16, 20)

    def _message(self, body):
        message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            self._calls += 1
            name = choice["function"]["name"]
            call = {
                "index": 0,
                "id": f"call_{self._calls}",
                "type": "function",
                "function": {"name": name, "arguments": self.raw_args or _spell(body["tools"], name)},
            }
            message |= {"content": None, "tool_calls": [call]}
        return message


_USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
_RESPONSE = {
    "id": "r",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "output": [],
}


def _completion(kind, choice, usage):
    return {"id": "x", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": usage}


def _spell(tools, name):
    schema = next(tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name)
    members = [
        f'"{key}" :{json.dumps(value.get("enum", ["x"])[0])}' for key, value in schema["properties"].items()
    ]
    return "{ " + ",".join(members) + "}"


def _events(message, body):
    deltas = [{"role": "assistant", "content": ""}]
    if message.get("reasoning"):
        deltas += [{"reasoning": part} for part in _halves(message["reasoning"])]
    deltas += [{"content": part} for part in _halves(message["content"] or "")]
    for call in message.get("tool_calls", []):
        deltas.append(
            {"tool_calls": [{**call, "function": {"name": call["function"]["name"], "arguments": ""}}]}
        )
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
            for part in _halves(call["function"]["arguments"])
        ]
    chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    chunks.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    lines = [json.dumps(_completion("chat.completion.chunk", chunk, None)) for chunk in chunks]
    if (body.get("stream_options") or {}).get("include_usage"):
        lines.append(json.dumps({**_completion("chat.completion.chunk", {}, _USAGE), "choices": []}))
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


def _halves(text):
    middle = len(text) // 2
    return [part for part in (text[:middle], text[middle:]) if part]


@pytest.fixture
def router():
    """A router in memory; its `client()` and `async_client()` talk to it."""
    return FakeRouter()


@pytest.fixture
def served(router):
    """The base URL under which that router answers on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["content-length"]))
            request = http.Request(
                "POST", f"http://router{self.path}", headers=self.headers.items(), content=content
            )
            response = router.answer(request)
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()
