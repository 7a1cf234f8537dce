"""Spans: one per turn, one per leg, in the GenAI conventions, and nothing private in them."""

import asyncio
import logging
import subprocess
import sys

import httpx2
import pytest
from fake_engine import Failure, FakeEngine, eventually, serving
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bidikv_server.router.app import create_app
from bidikv_server.router.otel import OtelTracing
from bidikv_server.router.settings import RouterSettings, SettingsError
from bidikv_server.router.tracing import NoTracing, open_tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def traced(anyio_backend):
    """A client of a traced router in front of two engines, the engines, and the exporter."""
    exporter = InMemorySpanExporter()
    engines = [FakeEngine("prefill"), FakeEngine("decode")]
    async with serving(*engines) as urls:
        settings = RouterSettings(
            prefill=urls[:1], decode=urls[1:], probe_interval_s=600, decode_timeout_s=0.3
        )
        app = create_app(settings, OtelTracing(SimpleSpanProcessor(exporter)))
        async with (
            serving(app, lifespan="on") as (url,),
            httpx2.AsyncClient(base_url=url, timeout=10) as client,
        ):
            yield client, engines, exporter


async def spans(exporter, *names: str) -> dict[str, list]:
    """Those that have ended, by name; waits for these names: a span may end a moment after its answer."""
    await eventually(lambda: set(names) <= {span.name for span in exporter.get_finished_spans()})
    found: dict[str, list] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


async def chat(client, *contents, headers=None, **fields):
    messages = [{"role": "user", "content": content} for content in contents]
    return await client.post(
        "/v1/chat/completions", json={"model": "m-1", "messages": messages, **fields}, headers=headers
    )


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_one_turn(traced, stream):
    """A server span under the client's, and a client span per leg under that, each of which its engine is told."""
    client, (prefill, decode), exporter = traced
    decode.answer = b'{"id":"c1","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":7}}'
    decode.events = (
        b'data: {"id":"c1","choices":[]}\n\ndata: {"id":"c1","choices":[],"usage":{"completion_tokens":7}}\n\n',
        b"data: [DONE]\n\n",
    )
    answer = await chat(client, "hi", headers={**PARENT, "X-Request-Id": "r-1"}, stream=stream)
    found = await spans(exporter, "chat m-1")
    (turn,), (first,), (second,) = found["chat m-1"], found["prefill leg"], found["decode leg"]
    assert turn.kind is SpanKind.SERVER
    assert f"{turn.context.trace_id:032x}" == TRACE
    assert f"{turn.parent.span_id:016x}" == SPAN
    ttft_s = turn.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < ttft_s < 10
    assert dict(turn.attributes) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "url.path": "/v1/chat/completions",
        "gen_ai.conversation.id": answer.headers["x-bidikv-session"], "gen_ai.request.model": "m-1",
        "gen_ai.response.id": "c1", "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 80, "gen_ai.response.time_to_first_chunk": ttft_s,
        "http.response.status_code": 200, "bidikv.request.id": "r-1", "bidikv.placement": "least_loaded",
        "bidikv.queued_s": turn.attributes["bidikv.queued_s"], "bidikv.reuse.reason": "new_conversation",
        "bidikv.reuse.remote_tokens": 64, "bidikv.reuse.local_tokens": 16, "bidikv.reuse.computed_tokens": 20,
    }  # fmt: skip
    for leg, engine in ((first, prefill), (second, decode)):
        assert leg.kind is SpanKind.CLIENT
        assert leg.parent.span_id == turn.context.span_id
        assert leg.attributes["server.address"] == "127.0.0.1"
        assert leg.attributes["bidikv.leg.outcome"] == "ok"
        (seen,) = engine.seen
        assert seen.headers["traceparent"] == f"00-{TRACE}-{leg.context.span_id:016x}-01"
        assert seen.headers["tracestate"] == "vendor=1"
    assert turn.resource.attributes["service.name"] == "bidikv-router"


@pytest.mark.anyio
async def test_without_a_parent(traced):
    """A turn begins a trace of its own; engines are told of it though the client sent none."""
    client, (prefill, _), exporter = traced
    await chat(client, "hi", headers={"traceparent": "nonsense"})
    (turn,) = (await spans(exporter, "chat m-1"))["chat m-1"]
    assert turn.parent is None
    assert f"{turn.context.trace_id:032x}" in prefill.seen[0].headers["traceparent"]


@pytest.mark.anyio
async def test_failures(traced):
    """The outcome is the error's type on the leg and on the turn; a leg that is retried leaves two spans."""
    client, (prefill, decode), exporter = traced
    prefill.failures.append(Failure(500))
    decode.failures.append(Failure(hang=True))
    assert (await chat(client, "hi")).status_code == 504
    found = await spans(exporter, "chat m-1")
    assert found["prefill leg"][0].attributes["error.type"] == "failed"
    assert found["decode leg"][0].attributes["error.type"] == "engine_timed_out"
    (turn,) = found["chat m-1"]
    assert (turn.status.status_code, turn.attributes["error.type"]) == (StatusCode.ERROR, "engine_timed_out")
    assert turn.attributes["http.response.status_code"] == 504


@pytest.mark.anyio
async def test_a_client_that_leaves_is_no_error(traced):
    """Both spans end, and say so."""
    client, (_, decode), exporter = traced
    decode.gate = asyncio.Event()
    body = {"model": "m-1", "prompt": "hi", "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_raw():
            break
    found = await spans(exporter, "text_completion m-1")
    assert found["decode leg"][0].attributes["bidikv.leg.outcome"] == "cancelled"
    (turn,) = found["text_completion m-1"]
    assert turn.status.status_code is StatusCode.UNSET


@pytest.mark.anyio
async def test_nothing_private_is_in_spans(traced):
    """Neither prompts, answers, session names nor credentials, also where engines quote them."""
    client, (prefill, decode), exporter = traced
    canaries = ("canary-prompt", "canary-answer", "sk-canary", "canary-session")
    echo = b'{"error":{"message":"canary-prompt sk-canary"}}'
    decode.answer = b'{"id":"c1","choices":[{"text":"canary-answer"}]}'
    for failure in (None, Failure(400, echo), Failure(500, echo), Failure(cut_after=0)):
        for engine in (prefill, decode):
            engine.failures.append(failure)
            headers = {"Authorization": "Bearer sk-canary", "X-Session-ID": "canary-session"}
            await chat(client, "canary-prompt", headers=headers)
            engine.failures.clear()
    told = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "refused_by_engine" in told
    assert {canary for canary in canaries if canary in told} == set()


@pytest.fixture
def variables(monkeypatch):
    """The environment without anything of OpenTelemetry's."""
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("switch", "environment", "traced"),
    [
        ("auto", {}, False),
        ("auto", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ("auto", {"OTEL_TRACES_EXPORTER": "none"}, False),
        ("auto", {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, False),
        ("off", {"OTEL_TRACES_EXPORTER": "console"}, False),
        ("on", {"OTEL_TRACES_EXPORTER": "console"}, True),
    ],
)
def test_when_turns_are_traced(variables, switch, environment, traced):
    """By the setting, and under `auto` by OpenTelemetry's own variables."""
    for name, value in environment.items():
        variables.setenv(name, value)
    tracing = open_tracing(switch)
    tracing.close()
    assert isinstance(tracing, NoTracing) is not traced


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")]
)
def test_unknown_exporter(variables, name, value):
    """One line that names the setting and the exporter."""
    variables.setenv(name, value)
    with pytest.raises(SettingsError, match=r"^tracing: there is no OpenTelemetry exporter '[^\n]*$"):
        open_tracing("on")


def test_not_installed(variables, caplog):
    """Asked for by the setting: an error in one line; by a variable alone: a warning."""

    def missing(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    variables.delitem(sys.modules, "bidikv_server.router.otel", raising=False)
    real = __import__
    variables.setattr("builtins.__import__", missing)
    with pytest.raises(SettingsError, match=r'^tracing: .*pip install "bidikv\[otel\]"$'):
        open_tracing("on")
    variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_tracing("auto"), NoTracing)
    assert "bidikv[otel]" in caplog.text


def test_not_imported_unless_asked_for():
    """A router without tracing loads nothing of it."""
    program = (
        "import sys; from bidikv_server.router.app import create_app; "
        "from bidikv_server.router.settings import RouterSettings; "
        "create_app(RouterSettings(prefill=('http://p',), decode=('http://d',))); "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
