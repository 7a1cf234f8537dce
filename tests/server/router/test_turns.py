"""Turns through a router and fake engines: placement, readback, retention and what failures lead to."""

import asyncio
import json

import pytest
from fake_engine import CHAT_EVENTS, Failure, FakeEngine, eventually, serving

from bidikv.headers import ReuseHeader, TurnHeader
from bidikv_server.router.core.engines import Role

pytestmark = pytest.mark.anyio

SESSION = {"X-Session-ID": "session-1"}


def reuse(answer) -> ReuseHeader:
    found = ReuseHeader.parse(answer.headers["x-bidikv-reuse"])
    assert found is not None
    return found


async def test_next_turn_reads_back(start):
    """The next turn goes to the same decode engine and prefill is told its retention index."""
    cluster = await start(decode=2)
    await cluster.chat("hi", headers=SESSION)
    cluster.app.engines.leg_started(
        cluster.urls["decode-0"], Role.DECODE
    )  # busier, and still the right place
    answer = await cluster.chat("hi", "Hello", "more", headers=SESSION)
    assert [len(engine.answered) for engine in cluster.decode] == [2, 0]
    assert cluster.prefill[0].prefilled[1].ours["sources"] == ["10.0.0.0:7000"]
    assert reuse(answer) == ReuseHeader("hit", 100, 64, 16, 20)


async def test_conversation_without_a_name(start):
    """Without a session the message chain finds the conversation, and strangers stay strangers."""
    cluster = await start()
    first = await cluster.chat("hi")
    second = await cluster.chat("hi", "Hello", "more")
    other = await cluster.chat("something else")
    assert reuse(second).reason == "hit"
    assert first.headers["x-bidikv-session"] == second.headers["x-bidikv-session"]
    assert reuse(other).reason == "new_conversation"
    assert other.headers["x-bidikv-session"] != first.headers["x-bidikv-session"]


async def test_ill_formed_session_is_none(start):
    """A session id that cannot be a name counts as none."""
    cluster = await start()
    await cluster.chat("hi", headers={"X-Session-ID": "two words"})
    answer = await cluster.chat("completely different", headers={"X-Session-ID": "two words"})
    assert reuse(answer).reason == "new_conversation"


async def test_edited_history_still_asks(start):
    """A known session whose history was rewritten asks its own engine: the engines find what is equal."""
    cluster = await start(decode=2)
    await cluster.chat("hi", headers=SESSION)
    await cluster.chat("summary instead", headers=SESSION)
    assert cluster.prefill[0].prefilled[1].ours["sources"] == ["10.0.0.0:7000"]
    assert len(cluster.decode[0].answered) == 2


async def test_completions(start):
    """Completions prompts are placed by their text, and both legs use the same endpoint."""
    cluster = await start()
    text = "long ago " * 100
    for prompt in (text, text + "and then", [text + "and then"]):
        answer = await cluster.client.post("/v1/completions", json={"model": "m", "prompt": prompt})
    assert reuse(answer).reason == "hit"
    assert {leg.path for leg in (*cluster.prefill[0].seen, *cluster.decode[0].seen)} == {"/v1/completions"}
    assert "max_completion_tokens" not in cluster.prefill[0].seen[0].body


@pytest.mark.parametrize(
    ("turn", "retain_s", "settings"),
    [
        (TurnHeader(), 480.0, {}),
        (TurnHeader(), 60.0, {"default_ttl_s": 60.0}),
        (TurnHeader(retain_s=30.0), 30.0, {}),
        (TurnHeader(retain_s=9999.0), 480.0, {}),
        (TurnHeader(retain_s=0), 0.0, {}),
        (TurnHeader(final=True), 0.0, {}),
        (TurnHeader(kind="aux", retain_s=30), 0.0, {}),
        (TurnHeader(), 0.0, {"readback": False}),
    ],
)
async def test_retention(start, turn, retain_s, settings):
    """Decode retains for as long as the client hints, within the limit."""
    cluster = await start(**settings)
    await cluster.chat("hi", headers={"x-bidikv-turn": turn.format()})
    assert cluster.decode[0].answered[0].ours["retain_s"] == retain_s


async def test_aux_turn_leaves_no_trace(start):
    """An auxiliary turn does not become part of its conversation."""
    cluster = await start()
    await cluster.chat("hi", headers={**SESSION, "x-bidikv-turn": TurnHeader(kind="aux").format()})
    assert len(cluster.app.table) == 0


@pytest.mark.parametrize("settings", [{"readback": False}, {}])
async def test_readback_off(start, settings):
    """Readback can be off for a request or for the router; the conversation still stays in place."""
    cluster = await start(decode=2, **settings)
    off = {} if settings else {"x-bidikv-readback": "off"}
    await cluster.chat("hi", headers={**SESSION, **off})
    answer = await cluster.chat("hi", "Hello", "more", headers={**SESSION, **off})
    assert reuse(answer).reason == "readback_off"
    assert cluster.prefill[0].prefilled[1].ours["sources"] == []
    assert cluster.decode[0].answered[1].ours["retain_s"] == 0
    assert len(cluster.decode[0].answered) == 2


async def test_stock_engines(start):
    """Engines that know nothing of this product serve turns; the reason says why nothing is reused."""
    cluster = await start()
    cluster.prefill[0].account = None
    cluster.decode[0].index_lines = ""
    await cluster.probe()
    await cluster.chat("hi", headers=SESSION)
    answer = await cluster.chat("hi", "Hello", "more", headers=SESSION)
    assert reuse(answer) == ReuseHeader("no_index", prompt_tokens=77)


async def test_no_account(start):
    """A prefill engine that was asked but tells nothing is `unknown`."""
    cluster = await start()
    cluster.prefill[0].account = None
    await cluster.chat("hi", headers=SESSION)
    assert reuse(await cluster.chat("hi", "Hello", "more", headers=SESSION)).reason == "unknown"


async def test_restarted_decode(start):
    """A decode engine that came back as another incarnation holds nothing of ours."""
    cluster = await start()
    await cluster.chat("hi", headers=SESSION)
    cluster.decode[0].publish_index("reborn", "10.0.0.0:7000")
    await cluster.probe()
    answer = await cluster.chat("hi", "Hello", "more", headers=SESSION)
    assert reuse(answer).reason == "decode_changed"
    answer = await cluster.chat("hi", "Hello", "more", "Hello", "again", headers=SESSION)
    assert reuse(answer).reason == "hit"


async def test_lost_decode(start):
    """When the conversation's engine is down, another one serves it from scratch."""
    cluster = await start(decode=2)
    await cluster.chat("hi", headers=SESSION)
    cluster.decode[0].healthy = False
    await cluster.probe()
    answer = await cluster.chat("hi", "Hello", "more", headers=SESSION)
    assert reuse(answer).reason == "decode_changed"
    assert len(cluster.decode[1].answered) == 1
    assert cluster.prefill[0].prefilled[1].ours["sources"] == []


async def test_several_choices_run_on_decode_alone(start):
    """A request whose KV one handle cannot carry is answered by decode without one."""
    cluster = await start()
    answer = await cluster.chat("hi", n=2)
    assert reuse(answer).reason == "unsupported"
    assert cluster.prefill[0].seen == []
    assert cluster.decode[0].answered[0].params is None


@pytest.mark.parametrize("failure", [Failure(500), Failure(503), Failure(cut_after=0), Failure(hang=True)])
async def test_prefill_fails_over(start, failure):
    """A prefill leg that fails is run by another prefill engine."""
    cluster = await start(prefill=2, prefill_timeout_s=0.3)
    cluster.prefill[0].failures.append(failure)
    answer = await cluster.chat("hi")
    assert answer.content == cluster.decode[0].answer
    assert [len(engine.prefilled) for engine in cluster.prefill] == [1, 1]
    assert cluster.decode[0].answered[0].params["remote_engine_id"] == "prefill-1"


async def test_prefill_falls_back_to_decode(start):
    """Without any prefill engine left, decode answers alone, retains the turn, and it can be read back next time."""
    cluster = await start()
    await cluster.chat("hi", headers=SESSION)
    cluster.prefill[0].failures.append(Failure(500))
    answer = await cluster.chat("hi", "Hello", "more", headers=SESSION)
    assert (answer.status_code, reuse(answer).reason) == (200, "no_prefill")
    first, alone = cluster.decode[0].answered
    assert alone.params == {"bidikv": first.ours}
    assert [turn.depth for turn in cluster.app.table.turns(answer.headers["x-bidikv-session"])] == [1, 3]


async def test_a_stock_engine_retains_nothing_alone(start):
    """Without prefill a stock decode engine gets no transfer parameters, and earlier turns stay in place."""
    cluster = await start()
    cluster.decode[0].index_lines = ""
    await cluster.probe()
    await cluster.chat("hi", headers=SESSION)
    cluster.prefill[0].failures.append(Failure(500))
    answer = await cluster.chat("hi", "Hello", "more", headers=SESSION)
    assert answer.status_code == 200
    assert reuse(answer).reason == "no_prefill"
    assert cluster.decode[0].answered[1].params is None
    (turn,) = cluster.app.table.turns(answer.headers["x-bidikv-session"])
    assert turn.depth == 1


async def test_prefill_without_fallback(start):
    """With the fallback off the client gets the engine's own error."""
    cluster = await start(prefill_fallback=False)
    cluster.prefill[0].failures.append(Failure(500, b'{"odd":  "bytes"}'))
    answer = await cluster.chat("hi")
    assert (answer.status_code, answer.content) == (500, b'{"odd":  "bytes"}')
    assert cluster.decode[0].seen == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_engines_refusal_is_relayed(start, role, status):
    """An engine's verdict on the request reaches the client untouched and is not retried."""
    cluster = await start(prefill=2, decode=2)
    getattr(cluster, role)[0].failures.append(Failure(status, b'{"error": {"message": "no such model"}}\n'))
    answer = await cluster.chat("hi", stream=True)
    assert answer.status_code == status
    assert answer.content == b'{"error": {"message": "no such model"}}\n'
    assert cluster.prefill[1].seen == cluster.decode[1].seen == []
    assert len(cluster.app.table) == 0


@pytest.mark.parametrize(
    ("failure", "stream"),
    [
        (Failure(500), False),
        (Failure(500), True),
        (Failure(cut_after=0), False),
        (Failure(cut_after=0), True),
        (Failure(end_after=0), False),
        (Failure(end_after=0), True),
        (Failure(hang=True), False),
        (Failure(hang=True), True),
    ],
)
async def test_decode_fails_over(start, failure, stream):
    """A decode leg that fails before its first byte is run by another engine, after a prefill leg of its own."""
    cluster = await start(decode=2, first_byte_timeout_s=0.3, decode_timeout_s=0.3)
    cluster.decode[0].failures.append(failure)
    answer = await cluster.chat("hi", stream=stream)
    assert answer.content == (b"".join(CHAT_EVENTS) if stream else cluster.decode[0].answer)
    assert len(cluster.prefill[0].prefilled) == 2
    assert cluster.decode[1].answered[0].params["remote_request_id"] == "prefill-0-1"


async def test_only_decode_breaks(start):
    """With no other decode engine a broken connection is a 502 in OpenAI's shape."""
    cluster = await start()
    cluster.decode[0].failures.append(Failure(cut_after=0))
    answer = await cluster.chat("hi")
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_failed"
    assert "x-request-id" in answer.headers
    assert (await cluster.chat("hi")).status_code == 200  # one broken connection does not make an engine down


async def test_only_decode_times_out(start):
    """With no other decode engine a silent one is a 504."""
    cluster = await start(decode_timeout_s=0.2)
    cluster.decode[0].failures.append(Failure(hang=True))
    answer = await cluster.chat("hi")
    assert answer.status_code == 504
    await eventually(lambda: cluster.decode[0].aborted == 1)


async def test_failed_pull_is_recomputed(start):
    """The only decode engine fails with a handle: it gets the request once more without."""
    cluster = await start()
    cluster.decode[0].failures.append(Failure(500))
    answer = await cluster.chat("hi")
    assert answer.status_code == 200
    assert reuse(answer).reason == "transfer_failed"
    assert set(cluster.decode[0].answered[1].params) == {"bidikv"}


async def test_broken_decode_answers_for_itself(start):
    """When that fails as well, its own error is relayed."""
    cluster = await start()
    cluster.decode[0].failures.extend([Failure(500), Failure(500, b"own words")])
    answer = await cluster.chat("hi")
    assert (answer.status_code, answer.content) == (500, b"own words")


async def test_error_event_first(start):
    """A stream that begins with an error event has shown the client nothing yet: it is tried again."""
    cluster = await start(decode=2)
    cluster.decode[0].events = (b'data: {"error": {"message": "pull failed"}}\n\n', b"data: [DONE]\n\n")
    answer = await cluster.chat("hi", stream=True)
    assert answer.content == b"".join(CHAT_EVENTS)


async def test_error_event_everywhere(start):
    """When no engine does better the error event is passed on, and nothing is recorded."""
    cluster = await start()
    cluster.decode[0].events = (b'data: {"error": {"message": "pull failed"}}\n\n', b"data: [DONE]\n\n")
    answer = await cluster.chat("hi", stream=True)
    assert answer.content == b"".join(cluster.decode[0].events)
    assert len(cluster.app.table) == 0


@pytest.mark.parametrize("failure", [Failure(cut_after=2), Failure(end_after=2)])
async def test_mid_stream_failure_is_visible(start, failure):
    """A stream that breaks off ends with an error event, and the turn is not recorded."""
    cluster = await start(decode=2)
    cluster.decode[0].failures.append(failure)
    answer = await cluster.chat("hi", stream=True)
    assert answer.status_code == 200
    passed, event = answer.content.split(b"data: {", 3)[:3], answer.content.rsplit(b"data: ", 1)[1]
    assert len(passed) == 3
    assert json.loads(event)["error"]["code"] == "engine_failed"
    assert answer.content.endswith(b"}\n\n")
    assert b"[DONE]" not in answer.content
    assert len(cluster.app.table) == 0
    assert cluster.decode[1].seen == []


async def test_idle_stream_is_visible(start):
    """A stream that falls silent ends with an error event, and the engine's request is aborted."""
    cluster = await start(idle_timeout_s=0.2)
    cluster.decode[0].gate = asyncio.Event()
    answer = await cluster.chat("hi", stream=True)
    assert json.loads(answer.content.rsplit(b"data: ", 1)[1])["error"]["code"] == "engine_timed_out"
    await eventually(lambda: cluster.decode[0].aborted == 1)


async def test_cut_within_an_event(start):
    """The error event stands alone even if the stream broke inside a line."""
    cluster = await start()
    cluster.decode[0].events = (CHAT_EVENTS[0] + b'data: {"id":', b"never")
    cluster.decode[0].failures.append(Failure(cut_after=1))
    answer = await cluster.chat("hi", stream=True)
    assert b'data: {"id":\n\ndata: {"error"' in answer.content


async def test_failed_turn_keeps_the_earlier_one(start):
    """After a failed turn the one before it is still where the next one reads."""
    cluster = await start()
    await cluster.chat("hi", headers=SESSION)
    cluster.decode[0].failures.append(Failure(cut_after=1))
    await cluster.chat("hi", "Hello", "more", headers=SESSION, stream=True)
    answer = await cluster.chat("hi", "Hello", "more", headers=SESSION, stream=True)
    assert reuse(answer).reason == "hit"
    assert len(cluster.app.table.turns(answer.headers["x-bidikv-session"])) == 2


@pytest.mark.parametrize("events", [CHAT_EVENTS, (b"".join(CHAT_EVENTS),)])
async def test_turn_is_recorded_before_its_end_is_seen(start, events):
    """A client that hangs up, or goes on, the moment it sees the end finds its turn recorded."""
    cluster = await start()
    cluster.decode[0].events = events
    cluster.decode[0].gate_at, cluster.decode[0].gate = len(events) - 1, asyncio.Event()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with cluster.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for chunk in answer.aiter_raw():
            if chunk.endswith(b"[DONE]\n\n"):
                assert len(cluster.app.table) == 1
                break
    await eventually(lambda: cluster.app.engines.snapshots(Role.DECODE)[0].in_flight == 0)
    metrics = (await cluster.client.get("/metrics")).text
    assert 'turns_total{reason="new_conversation"} 1.0' in metrics
    assert "client_gone" not in metrics


async def test_unreachable_engines(start):
    """A refused connection takes the engine down at once; with none left the answer is 503."""
    async with serving(FakeEngine()) as (gone,):
        pass
    cluster = await start(decode_before=(gone,))
    cluster.app.engines.probe_passed(gone, Role.DECODE, ())
    answer = await cluster.chat("hi")
    assert answer.status_code == 200
    assert len(cluster.decode[0].answered) == 1
    health = (await cluster.client.get("/health")).json()
    assert [engine["healthy"] for engine in health["decode"]] == [False, True]
    cluster.decode[0].healthy = False
    await cluster.probe()
    answer = await cluster.chat("hi")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_engine_available"
    assert answer.headers["retry-after"] == "1"


async def test_disconnect_aborts_prefill(start):
    """A client that leaves during prefill leaves no request behind, and decode is never asked."""
    cluster = await start()
    cluster.prefill[0].failures.append(Failure(hang=True))
    asking = asyncio.ensure_future(cluster.chat("hi"))
    await eventually(lambda: cluster.prefill[0].seen)
    asking.cancel()
    await eventually(lambda: cluster.prefill[0].aborted == 1)
    assert cluster.decode[0].seen == []
    await eventually(lambda: cluster.app.engines.snapshots(Role.PREFILL)[0].in_flight == 0)
    assert 'failed_turns_total{cause="client_gone"} 1.0' in (await cluster.client.get("/metrics")).text


async def test_disconnect_aborts_decode(start):
    """A client that leaves a stream ends the decode leg; the turn is not recorded."""
    cluster = await start()
    cluster.decode[0].gate = asyncio.Event()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with cluster.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        await anext(answer.aiter_raw())
    await eventually(lambda: cluster.decode[0].aborted == 1)
    await eventually(lambda: cluster.app.engines.snapshots(Role.DECODE)[0].in_flight == 0)
    assert len(cluster.app.table) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_is_not_the_client(start, stream):
    """A turn that the router's own end cuts off is counted and told of as that, and its leg is aborted."""
    cluster = await start()
    cluster.decode[0].gate = asyncio.Event()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    waiting, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], []

    async def receive():
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    turn = asyncio.ensure_future(cluster.app(scope, receive, send))
    await eventually(lambda: cluster.decode[0].answered and (sent or not stream))
    cluster.app.stop()
    turn.cancel()  # what uvicorn does when the grace period is over
    await turn
    assert b"shutting_down" in b"".join(message.get("body", b"") for message in sent)
    await eventually(lambda: cluster.decode[0].aborted == 1)
    metrics = (await cluster.client.get("/metrics")).text
    assert 'failed_turns_total{cause="shutting_down"} 1.0' in metrics
    assert "client_gone" not in metrics
    (told,) = cluster.app.recent.latest(1, after=0)
    assert told.report.outcome == "shutting_down"
    assert len(cluster.app.table) == 0


async def test_media_that_the_client_names_are_not_reused(start):
    """Engines would take the name for the content: nothing is read back and nothing kept, and the turn is served."""
    cluster = await start()
    parts = [
        {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "mine"},
        {"type": "text", "text": "hi"},
    ]
    await cluster.chat(parts, headers=SESSION)
    answer = await cluster.chat(parts, "Hello", "more", headers=SESSION)
    assert reuse(answer).reason == "unsupported"
    assert cluster.prefill[0].prefilled[1].ours["sources"] == []
    assert cluster.decode[0].answered[1].ours["retain_s"] == 0
