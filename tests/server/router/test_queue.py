"""A bounded number of turns, a bounded queue, and a door that closes."""

import asyncio
import time

import pytest
from fake_engine import CHAT_EVENTS, FakeEngine, eventually, serving

from bidikv_server.router.app import create_app
from bidikv_server.router.errors import ShuttingDown, TooManyTurns
from bidikv_server.router.metrics import RouterMetrics
from bidikv_server.router.queue import Phase, TurnQueue
from bidikv_server.router.settings import RouterSettings

pytestmark = pytest.mark.anyio


def waiting(cluster) -> int:
    return cluster.app._queue._admission.waiting


async def metrics(cluster) -> str:
    return (await cluster.client.get("/metrics")).text


@pytest.fixture
async def busy(start):
    """A cluster that runs one turn at a time, and a turn that runs until its gate opens."""

    async def _busy(**settings):
        cluster = await start(max_in_flight=1, **settings)
        cluster.decode[0].gate = asyncio.Event()
        running = asyncio.ensure_future(cluster.chat("first", stream=True))
        await eventually(lambda: cluster.decode[0].answered)
        return cluster, running

    return _busy


async def test_turns_wait_and_then_run(busy):
    """A turn above the limit waits, untouched, and runs when the one before it ends."""
    cluster, running = await busy(max_queue=2)
    second = asyncio.ensure_future(cluster.chat("second"))
    await eventually(lambda: waiting(cluster) == 1)
    third = asyncio.ensure_future(cluster.chat("third"))
    await eventually(lambda: waiting(cluster) == 2)
    assert "bidikv_router_turns_queued 2.0" in await metrics(cluster)
    assert len(cluster.prefill[0].seen) == 1
    cluster.decode[0].gate.set()
    answers = await asyncio.gather(running, second, third)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    contents = [leg.body["messages"][0]["content"] for leg in cluster.decode[0].answered]
    assert contents == ["first", "second", "third"]
    assert "bidikv_router_turns_queued 0.0" in await metrics(cluster)


async def test_beyond_the_queue(busy):
    """One error in OpenAI's shape that says when to come back; what is in the queue stays there."""
    cluster, running = await busy(max_queue=1)
    second = asyncio.ensure_future(cluster.chat("second"))
    await eventually(lambda: waiting(cluster) == 1)
    answer = await cluster.chat("third")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "too_many_turns", None)
    assert 'refused_turns_total{cause="too_many_turns"} 1.0' in await metrics(cluster)
    cluster.decode[0].gate.set()
    assert [(await turn).status_code for turn in (running, second)] == [200, 200]


async def test_nothing_else_waits(busy):
    """Health, readiness, metrics and models are answered whatever the queue."""
    cluster, running = await busy(max_queue=0)
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert (await cluster.client.get(path)).status_code == 200
    cluster.decode[0].gate.set()
    await running


async def test_a_refused_body_is_not_read(busy):
    """A turn that has no chance is told so while its body is still on its way."""
    cluster, running = await busy(max_queue=0)

    async def body():
        while True:
            yield b" " * 1000
            await asyncio.sleep(0.01)

    asking = asyncio.ensure_future(cluster.client.post("/v1/completions", content=body()))
    await eventually(lambda: 'cause="too_many_turns"} 1.0' in cluster.app.metrics.render().decode())
    asking.cancel()
    cluster.decode[0].gate.set()
    await running


async def test_who_leaves_the_queue_is_gone(busy):
    """A waiting client that disconnects frees its place and reaches no engine."""
    cluster, running = await busy(max_queue=1)
    second = asyncio.ensure_future(cluster.chat("second"))
    await eventually(lambda: waiting(cluster) == 1)
    second.cancel()
    await eventually(lambda: waiting(cluster) == 0)
    third = asyncio.ensure_future(cluster.chat("third"))
    await eventually(lambda: waiting(cluster) == 1)
    cluster.decode[0].gate.set()
    assert [(await turn).status_code for turn in (running, third)] == [200, 200]
    assert len(cluster.decode[0].answered) == 2


async def test_a_failed_turn_frees_its_place(start):
    """Whatever becomes of a turn, the next one runs."""
    cluster = await start(max_in_flight=1, max_queue=0)
    for body in (b"{", b'{"model": "m"}'):
        assert (await cluster.client.post("/v1/chat/completions", content=body)).status_code == 400
    assert (await cluster.chat("hi")).status_code == 200
    assert not cluster.app._queue._admission.running


async def test_waiting_counts_as_time_to_first_token(busy):
    """What a client waits for is measured from its request, not from its turn in the queue."""
    cluster, running = await busy(max_queue=1)
    second = asyncio.ensure_future(cluster.chat("second"))
    await eventually(lambda: waiting(cluster) == 1)
    began_s = time.monotonic()
    await eventually(lambda: time.monotonic() - began_s > 0.2)
    cluster.decode[0].gate.set()
    await asyncio.gather(running, second)
    (last,), _ = cluster.app.history.page(began_s, limit=1)
    assert last.records[-1].ttft_s > 0.2


async def test_a_place_passes_over_the_cancelled():
    """A turn that is cancelled in the moment its turn comes passes its place on."""
    queue = TurnQueue(RouterMetrics(), max_in_flight=1, max_queue=2)
    queue.open()
    ran = []

    async def turn(name, gate=None):
        async with queue.place():
            ran.append(name)
            if gate is not None:
                await gate.wait()

    gate = asyncio.Event()
    turns = [asyncio.ensure_future(turn(*args)) for args in (("a", gate), ("b",), ("c",))]
    await eventually(lambda: queue._admission.waiting == 2)
    gate.set()
    await asyncio.sleep(0)  # `a` ends and wakes `b`, which is cancelled before it runs
    await asyncio.sleep(0)
    turns[1].cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    assert ran in (["a", "c"], ["a", "b", "c"])
    assert not queue._admission.running


async def test_closed_door(start):
    """A router that stops refuses new turns and waiting ones, says so, and ends what runs."""
    cluster = await start(max_in_flight=1, max_queue=1)
    cluster.decode[0].gate = asyncio.Event()
    running = asyncio.ensure_future(cluster.chat("first", stream=True))
    await eventually(lambda: cluster.decode[0].answered)
    queued = asyncio.ensure_future(cluster.chat("second"))
    await eventually(lambda: waiting(cluster) == 1)
    cluster.app.stop()
    for answer in (await queued, await cluster.chat("third")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "shutting_down"
    ready = await cluster.client.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
    cluster.decode[0].gate.set()
    assert (await running).content == b"".join(CHAT_EVENTS)
    assert 'refused_turns_total{cause="shutting_down"} 2.0' in await metrics(cluster)


async def test_before_the_start():
    """Until engines were probed once the router is not ready and takes no turns."""
    queue = TurnQueue(RouterMetrics(), max_in_flight=None, max_queue=0)
    assert queue.phase is Phase.STARTING
    with pytest.raises(ShuttingDown):
        queue.check()
    queue.open()
    queue.check()
    queue.close()
    with pytest.raises(ShuttingDown):
        async with queue.place():
            pass


async def test_full_after_the_check():
    """A turn that found room before its body was read may find none afterwards."""
    queue = TurnQueue(RouterMetrics(), max_in_flight=1, max_queue=0)
    queue.open()
    queue.check()
    async with queue.place():
        with pytest.raises(TooManyTurns):
            async with queue.place():
                pass


async def test_ready(start):
    """Ready needs an engine of each role that takes turns: neither down nor draining."""
    cluster = await start(admin_key="k")
    assert (await cluster.client.get("/ready")).json() == {"status": "ready"}
    for role in ("prefill", "decode"):
        (engine,) = getattr(cluster, role)
        engine.healthy = False
        await cluster.probe()
        answer = await cluster.client.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "unavailable", "missing": [role]})
        engine.healthy = True
        await cluster.probe()
    drained = {"url": cluster.urls["decode-0"]}
    await cluster.client.post("/bidikv/v1/engines/drain", json=drained, headers={"x-api-key": "k"})
    assert (await cluster.client.get("/ready")).json()["missing"] == ["decode"]


async def test_an_application_that_ends_is_closed():
    """Also under another server the end of the application's life closes the door."""
    async with serving(FakeEngine()) as (url,):
        app = create_app(RouterSettings(prefill=(url,), decode=(url,)))
        assert app._queue.phase is Phase.STARTING
        async with serving(app, lifespan="on"):
            assert app._queue.phase is Phase.SERVING
        assert app._queue.phase is Phase.STOPPING


async def test_a_flooding_tenant_does_not_starve_another(start):
    """A tenant's turn runs before the many of another that have waited longer, and takes a place in a full queue."""
    keys = {"sk-flood": "flood", "sk-quiet": "quiet"}
    cluster = await start(max_in_flight=1, max_queue=3, api_keys=keys)
    cluster.decode[0].gate = asyncio.Event()

    def chat(content, tenant):
        return asyncio.ensure_future(cluster.chat(content, headers={"authorization": f"Bearer sk-{tenant}"}))

    flood = [chat("flood 0", "flood")]
    await eventually(lambda: cluster.decode[0].answered)
    for number in range(1, 4):
        flood.append(chat(f"flood {number}", "flood"))
        await eventually(lambda number=number: waiting(cluster) == number)
    quiet = chat("quiet", "quiet")
    refused = await flood[3]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "too_many_turns"
    cluster.decode[0].gate.set()
    assert [(await turn).status_code for turn in (*flood[:3], quiet)] == [200] * 4
    contents = [leg.body["messages"][0]["content"] for leg in cluster.decode[0].answered]
    assert contents == ["flood 0", "quiet", "flood 1", "flood 2"]
    assert not cluster.app._queue._displaced


async def test_a_tenants_own_limit(start):
    """A tenant's turns beyond its limit wait, and another tenant's run beside them."""
    cluster = await start(max_in_flight_per_tenant=1)
    cluster.decode[0].gate = asyncio.Event()
    turns = [
        asyncio.ensure_future(cluster.chat(name, headers={"authorization": name})) for name in ("a", "a", "b")
    ]
    await eventually(lambda: len(cluster.decode[0].answered) == 2 and waiting(cluster) == 1)
    assert sorted(leg.body["messages"][0]["content"] for leg in cluster.decode[0].answered) == ["a", "b"]
    cluster.decode[0].gate.set()
    assert [(await turn).status_code for turn in turns] == [200] * 3
