"""One line per turn, whatever becomes of it, and nothing in it that a client or an operator keeps to itself."""

import asyncio
import io
import json
import logging

import httpx2
import pytest
from fake_engine import CHAT_EVENTS, Failure, eventually, serving

from bidikv_server.router import routes, watch
from bidikv_server.router.app import create_app
from bidikv_server.router.core.identity import SOURCES
from bidikv_server.router.logs import JsonFormatter, TextFormatter
from bidikv_server.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

CANARIES = ("canary-prompt", "canary-answer", "sk-canary-client", "sk-canary-upstream", "sk-canary-admin",
            "canary-secret", "canary-session", "canary-salt", "canary-user")  # fmt: skip
TURN = "bidikv_server.router.turn"


class Lines:
    """Everything that is logged, in both formats."""

    def __init__(self) -> None:
        self.streams = {JsonFormatter: io.StringIO(), TextFormatter: io.StringIO()}
        self.handlers = []
        for formatter, stream in self.streams.items():
            handler = logging.StreamHandler(stream)
            handler.setFormatter(formatter())
            # The test's own client and the fake engines log in the same process.
            handler.addFilter(
                lambda record: not record.name.startswith(("httpcore2", "httpx2", "uvicorn.access"))
            )
            self.handlers.append(handler)

    @property
    def documents(self) -> list[dict]:
        return [json.loads(line) for line in self.streams[JsonFormatter].getvalue().splitlines()]

    @property
    def turns(self) -> list[dict]:
        return [document for document in self.documents if document["logger"] == TURN]

    async def count(self, turns: int) -> list[dict]:
        """The lines of so many turns; the last one may come a moment after its answer."""
        await eventually(lambda: len(self.turns) >= turns)
        return self.turns

    @property
    def text(self) -> str:
        return "".join(stream.getvalue() for stream in self.streams.values())


@pytest.fixture
def lines(monkeypatch):
    root, written = logging.getLogger(), Lines()
    monkeypatch.setattr(root, "handlers", [*root.handlers, *written.handlers])
    level = root.level
    root.setLevel(logging.DEBUG)
    yield written
    root.setLevel(level)


async def test_a_turn(start, lines):
    """Who, what, where, how long, and what became of its prompt."""
    cluster = await start(api_keys={"sk-1": "team"})
    headers = {"Authorization": "Bearer sk-1", "X-Request-Id": "req-1", "X-Session-ID": "session-1"}
    await cluster.chat("hi", headers=headers)
    answer = await cluster.chat("hi", "Hello", "more", headers=headers, stream=True)
    assert answer.headers["x-request-id"] == "req-1"
    (_, told) = await lines.count(2)
    for name in ("time", "ttft_s", "seconds", "queued_s"):
        assert told.pop(name) is not None
    legs = told.pop("legs")
    assert [(leg["leg"], leg["engine"], leg["outcome"]) for leg in legs] == [
        ("prefill", cluster.urls["prefill-0"], "ok"), ("decode", cluster.urls["decode-0"], "ok"),
    ]  # fmt: skip
    assert told == {
        "level": "info", "logger": TURN, "message": "turn", "request_id": "req-1", "path": "/v1/chat/completions",
        "outcome": "ok", "status": 200, "conversation": answer.headers["x-bidikv-session"], "tenant": "team",
        "model": "m", "identity": "x_session_id", "reason": "hit", "prompt_tokens": 100, "remote_tokens": 64,
        "local_tokens": 16, "computed_tokens": 20, "placement": "home", "prefill_choice": "only", "mode": "readback", "mode_reason": "fixed", "prefill": cluster.urls["prefill-0"],
        "decode": cluster.urls["decode-0"],
    }  # fmt: skip


async def test_retries_are_told(start, lines):
    """Every leg of a turn that was tried elsewhere, in order."""
    cluster = await start(decode=2)
    cluster.decode[0].failures.append(Failure(500))
    await cluster.chat("hi")
    (told,) = await lines.count(1)
    assert [(leg["leg"], leg["outcome"]) for leg in told["legs"]] == [
        ("prefill", "ok"), ("decode", "failed"), ("prefill", "ok"), ("decode", "ok"),
    ]  # fmt: skip
    assert (told["outcome"], told["decode"]) == ("ok", cluster.urls["decode-1"])


@pytest.mark.parametrize(
    ("body", "key", "outcome"),
    [
        (b"{", "sk-1", ("invalid_request", 400)),
        (b"[" * 100_000, "sk-1", ("invalid_request", 400)),
        (b" " * 2000, "sk-1", ("request_too_large", 413)),
        (b"{}", "wrong", ("invalid_api_key", 401)),
    ],
)
async def test_refused_turns_have_their_line(start, lines, body, key, outcome):
    """Whoever is sent away finds the id of that in the answer."""
    cluster = await start(api_key="sk-1", max_body_bytes=10**6 if len(body) > 10_000 else 1000)
    answer = await cluster.client.post(
        "/v1/completions", content=body, headers={"Authorization": f"Bearer {key}"}
    )
    (told,) = await lines.count(1)
    assert (told["outcome"], told["status"], answer.status_code) == (*outcome, outcome[1])
    assert answer.headers["x-request-id"] == told["request_id"]
    assert "conversation" not in told


async def test_a_stop_loses_no_line(lines, monkeypatch):
    """Lines that wait for their moment are written when the router stops."""
    monkeypatch.setattr(watch, "_UNTOLD_S", 600.0)
    app = create_app(RouterSettings(prefill=("http://127.0.0.1:1",), decode=("http://127.0.0.1:1",)))
    async with serving(app, lifespan="on") as (url,), httpx2.AsyncClient(base_url=url) as client:
        assert (await client.post("/v1/completions", content=b"{")).status_code == 400
        assert lines.turns == []
    assert [told["outcome"] for told in lines.turns] == ["invalid_request"]


@pytest.mark.parametrize(
    ("failure", "stream", "outcome"),
    [
        (Failure(500), False, ("engine_failed", 500)),
        (Failure(400, b"{}"), False, ("refused_by_engine", 400)),
        (Failure(hang=True), True, ("engine_timed_out", 504)),
        (Failure(cut_after=1), True, ("mid_stream", 200)),
    ],
)
async def test_failed_turns(start, lines, failure, stream, outcome):
    """The cause, as the failure counter has it."""
    cluster = await start(first_byte_timeout_s=0.2, prefill_fallback=False)
    cluster.decode[0].failures.append(failure)
    await cluster.chat("hi", stream=stream)
    (told,) = await lines.count(1)
    assert (told["outcome"], told["status"]) == outcome
    counted = f'bidikv_router_failed_turns_total{{cause="{outcome[0]}"}} 1.0'
    assert counted in (await cluster.client.get("/metrics")).text


@pytest.mark.parametrize(("ended", "outcome"), [(False, "client_gone"), (True, "ok")])
async def test_clients_that_leave(start, lines, ended, outcome):
    """Leaving before the end is one outcome; hanging up after it is none."""
    cluster = await start()
    engine = cluster.decode[0]
    engine.gate, engine.gate_at = asyncio.Event(), 3 if ended else 0
    async with cluster.client.stream(
        "POST", "/v1/completions", json={"model": "m", "prompt": "hi", "stream": True}
    ) as answer:
        seen = b""
        async for chunk in answer.aiter_raw():
            seen += chunk
            if seen.endswith(CHAT_EVENTS[engine.gate_at]):
                break
    (told,) = await lines.count(1)
    assert told["outcome"] == outcome


async def test_nothing_private_is_told(start, lines, monkeypatch):
    """Neither prompts, answers, session names nor keys: not in logs, metrics or the account of turns, on any path."""
    cluster = await start(
        admin_key="sk-canary-admin", upstream_api_key="sk-canary-upstream", secret="canary-secret",
        api_keys={"sk-canary-client": "team"}, first_byte_timeout_s=0.2, decode_timeout_s=0.2, prefill_timeout_s=0.2,
        max_body_bytes=100_000,
    )  # fmt: skip
    echo = b'{"error":{"message":"canary-prompt sk-canary-client canary-answer","code":500}}'
    for events in (False, True):
        cluster.decode[0].answer = b'{"id":"c1","choices":[{"text":"canary-answer"}]}'
        cluster.decode[0].events = (b'data: {"id":"c1","x":"canary-answer"}\n\n', b"data: [DONE]\n\n")
        for failure in (None, Failure(400, echo), Failure(500, echo), Failure(401, echo), Failure(hang=True),
                        Failure(cut_after=0), Failure(cut_after=1), Failure(end_after=1)):  # fmt: skip
            for engine in (*cluster.decode, *cluster.prefill):
                engine.failures.append(failure)
                await ask(cluster, stream=events)
                engine.failures.clear()
                await cluster.probe()
    await ask(cluster, key="sk-canary-client-2")
    await ask(cluster, content="canary-prompt" * 10_000)
    for raw in (b'{"canary-prompt": ', b'"canary-prompt"', b'{"model": "m", "prompt": NaN, "x": "canary-prompt"}',
                b'{"model": {"canary-prompt": 1}}', b"[" * 50_000 + b"canary-prompt", b"canary-prompt\xff"):  # fmt: skip
        await cluster.client.post("/v1/completions", content=raw, headers=private_headers())
    admin = {"Authorization": "Bearer sk-canary-admin"}
    listed = (await cluster.client.get("/bidikv/v1/conversations", headers=admin)).json()
    assert listed["data"]
    for conversation in listed["data"]:
        path = f"/bidikv/v1/conversations/{conversation['key']}"
        assert (await cluster.client.get(path, headers=admin)).status_code == 200
        assert (await cluster.client.delete(path, headers=admin)).status_code == 200
    monkeypatch.setattr(routes, "read_request", fail)
    assert (await ask(cluster)).status_code == 500
    await eventually(lambda: lines.turns[-1]["outcome"] == "internal_error")
    turns = lines.turns
    assert {turn["outcome"] for turn in turns} >= {
        "ok", "refused_by_engine", "engine_failed", "engine_refuses_router", "engine_timed_out", "mid_stream",
        "invalid_api_key", "request_too_large", "invalid_request", "internal_error",
    }  # fmt: skip
    told = lines.text + (await cluster.client.get("/metrics")).text + repr(cluster.app.recent.latest(500))
    assert "Traceback" in told or "builtins" in told or "ValueError" in told
    assert {canary for canary in CANARIES if canary in told} == set()


def fail(*_args, **_kwargs):
    """An error whose message quotes what it failed on."""
    raise ValueError("canary-" + "prompt sk-" + "canary-client")


def private_headers(key: str = "sk-canary-client") -> dict[str, str]:
    """Every header by which a client may name a conversation, and its key."""
    named = {"x-session-id", "x-dynamo-session-id", "x-claude-code-session-id", "session-id", "thread-id"}
    assert len(SOURCES) > len(named)
    return {
        **dict.fromkeys(named, "canary-session"), "Authorization": f"Bearer {key}",
        "baggage": "session.id=canary-session", "x-bidikv-turn": 'v=1, a="canary-user"', "cookie": "canary-secret",
    }  # fmt: skip


async def ask(cluster, *, key="sk-canary-client", content="canary-prompt", **fields):
    return await cluster.chat(
        content, headers=private_headers(key), user="canary-user", cache_salt="canary-salt", **fields
    )
