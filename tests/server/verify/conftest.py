"""A running router over engines that answer like a small, deterministic model, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "doubles"))

from fake_engine import FakeEngine, serving

from bidikv_server.router.app import create_app
from bidikv_server.router.settings import RouterSettings

WORDS = ("red", "green", "blue", "sea", "stone", "lamp", "boat", "clock")


@dataclass
class ModelEngine(FakeEngine):
    """Answers decided by the prompt alone, but for what it is told to do wrong in conversations (`warm`).

    Attributes:
        wrong_after: From that many messages on, the second token of a conversation's answer is another one.
        margin: How much likelier the right second token is, in log probability.
        hang_after: From that many messages on, a conversation gets no answer.
        with_ids: Tell token ids.
        served: What the model list says.
        refuses: Body fields that this model does not take.
        usage: Share of KV blocks in use.
    """

    wrong_after: int | None = None
    margin: float = 3.0
    hang_after: int | None = None
    with_ids: bool = True
    served: tuple[str, ...] = ("m",)
    refuses: frozenset[str] = frozenset()
    usage: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def _get(self, path, query, send):
        if path == "/v1/models":
            models = [{"id": name, "max_model_len": 2048} for name in self.served]
            await _json(send, 200, {"object": "list", "data": models})
        elif path == "/metrics":
            self.index_lines = f'vllm:kv_cache_usage_perc{{engine="0"}} {self.usage}\n'
            await super()._get(path, query, send)
        else:
            await super()._get(path, query, send)

    async def _post(self, seen, failure, send):
        body = seen.body
        self.bodies.append(body)
        if self.refuses & set(body) or (seen.path.endswith("/completions") and self.refuses & {seen.path}):
            await _json(send, 400, {"error": {"message": "no", "type": "invalid_request_error"}})
            return
        if seen.ours.get("conversation") is not None and (seen.params or {}).get("do_remote_decode"):
            await super()._post(seen, failure, send)
            return
        warm = str(body.get("cache_salt", "")).startswith("verify-")
        messages = body.get("messages") or [body.get("prompt")]
        if warm and self.hang_after is not None and len(messages) >= self.hang_after:
            await asyncio.Event().wait()
        wrong = warm and self.wrong_after is not None and len(messages) >= self.wrong_after
        self.events = tuple(self._stream(body, messages, wrong=wrong))
        self.answer = json.dumps(self._whole(body, messages, wrong=wrong)).encode()
        await super()._post(seen, failure, send)

    def _prefill(self, seen):
        warm = str(seen.body.get("cache_salt", "")).startswith("verify-")
        reused = {"remote_tokens": 64, "local_tokens": 16, "computed_tokens": 20}
        none = {"remote_tokens": 0, "local_tokens": 0, "computed_tokens": 100}
        self.account = {"v": 1, "reason": "hit", "prompt_tokens": 100, **(reused if warm else none)}
        return super()._prefill(seen)

    def _tokens(self, messages, limit, *, wrong):
        seed = hashlib.sha256(json.dumps(messages).encode()).digest()
        ids = [byte % len(WORDS) for byte in seed[: min(limit, 12)]]
        return [ids[0], (ids[1] + 1) % len(WORDS), *ids[2:]] if wrong else ids

    def _choice(self, body, token, other):
        """What a chunk with this token holds, in either API."""
        text = WORDS[token] + " "
        ids = {"token_ids": [token]} if self.with_ids and body.get("return_token_ids") else {}
        logprobs = {}
        if body.get("logprobs"):
            name = "token_id:{}" if body.get("return_tokens_as_token_ids") else "{0.text}"
            name = name.format if "token_id" in name else lambda n: WORDS[n] + " "
            top = {name(token): -0.1, name(other): -0.1 - self.margin}
            entry = {"token": name(token), "logprob": -0.1}
            entry["top_logprobs"] = [{"token": key, "logprob": value} for key, value in top.items()]
            plain = {"tokens": [name(token)], "token_logprobs": [-0.1], "top_logprobs": [top]}
            logprobs = {"logprobs": {"content": [entry]} if "messages" in body else plain}
        return text, {"index": 0, **ids, **logprobs}

    def _choices(self, body, messages, *, wrong):
        right = self._tokens(messages, body["max_tokens"], wrong=False)
        said = self._tokens(messages, body["max_tokens"], wrong=wrong)
        others = self._tokens(messages, body["max_tokens"], wrong=not wrong)
        assert len(right) == len(said)
        return [self._choice(body, token, other) for token, other in zip(said, others, strict=True)]

    def _said(self, body, text, *, key):
        if "messages" not in body:
            return {"text": text}
        if isinstance(body.get("tool_choice"), dict):
            call = {"index": 0, "id": "call-x", "type": "function"}
            arguments = json.dumps({"colour": text.strip()})
            return {
                key: {"tool_calls": [{**call, "function": {"name": "choose_colour", "arguments": arguments}}]}
            }
        return {key: {"content": text}}

    def _stream(self, body, messages, *, wrong):
        for text, choice in self._choices(body, messages, wrong=wrong):
            yield _event({"choices": [{**choice, **self._said(body, text, key="delta")}]})
            if isinstance(body.get("tool_choice"), dict):
                break
        end = {"text": ""} if "messages" not in body else {"delta": {}}
        yield _event({"choices": [{"index": 0, **end, "finish_reason": "stop"}]})
        yield b"data: [DONE]\n\n"

    def _whole(self, body, messages, *, wrong):
        choices = self._choices(body, messages, wrong=wrong)
        if isinstance(body.get("tool_choice"), dict):
            choices = choices[:1]
        ids = [token for _, choice in choices for token in choice.get("token_ids", ())]
        said = self._said(body, "".join(text for text, _ in choices), key="message")
        named = {"token_ids": ids} if ids else {}
        return {"choices": [{"index": 0, **said, **named, "finish_reason": "stop"}]}


def _event(body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def _json(send, status, body):
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@dataclass(frozen=True)
class Running:
    """A router and its engines."""

    url: str
    prefill: ModelEngine
    decode: ModelEngine
    engine_urls: tuple[str, ...]


@pytest.fixture
def cluster():
    """One engine of each role and the real router, on loopback."""
    engines = ModelEngine("prefill"), ModelEngine("decode")
    ready: list[Running] = []
    started, stop = threading.Event(), []

    async def serve():
        ended = asyncio.Event()
        stop.append((asyncio.get_running_loop(), ended))
        async with contextlib.AsyncExitStack() as stack:
            urls = await stack.enter_async_context(serving(*engines))
            settings = RouterSettings(prefill=(urls[0],), decode=(urls[1],), probe_interval_s=600.0)
            (url,) = await stack.enter_async_context(serving(create_app(settings), lifespan="on"))
            ready.append(Running(url, *engines, tuple(urls)))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield ready[0]
    finally:
        loop, ended = stop[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()
