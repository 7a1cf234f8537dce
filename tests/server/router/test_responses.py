"""Responses that an engine keeps: what goes on from one, and what asks for one, goes to that engine."""

import asyncio

import pytest
from fake_engine import Failure, eventually

from bidikv.headers import ReuseHeader
from bidikv_server.router.core.engines import Role

pytestmark = pytest.mark.anyio


async def respond(cluster, text="hi", *, headers=None, **fields):
    return await cluster.client.post(
        "/v1/responses", json={"model": "m", "input": text, **fields}, headers=headers
    )


def name_of(engine, number=-1):
    """What the engine was told to call its answer."""
    return engine.answered[number].body["request_id"]


def unknown(name):
    return {
        "error": {
            "message": f"Response with id '{name}' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": 404,
        }
    }


async def test_goes_where_the_earlier_response_is(start):
    """Also when another engine is less busy; decode alone knows the prompt, and the reason says so."""
    cluster = await start(decode=2)
    first = await respond(cluster)
    cluster.app.engines.leg_started(cluster.urls["decode-0"], Role.DECODE)
    previous = name_of(cluster.decode[0])
    second = await respond(cluster, "more", previous_response_id=previous)
    third = await respond(cluster, "still more", previous_response_id=name_of(cluster.decode[0]))
    assert [len(engine.answered) for engine in cluster.decode] == [3, 0]
    assert len(cluster.prefill[0].prefilled) == 1
    assert cluster.decode[0].answered[1].body["previous_response_id"] == previous
    assert ReuseHeader.parse(second.headers["x-bidikv-reuse"]).reason == "previous_response"
    assert len({answer.headers["x-bidikv-session"] for answer in (first, second, third)}) == 1
    page = (await cluster.client.get("/metrics")).text
    assert 'bidikv_router_placements_total{reason="kept_response"} 2.0' in page


async def test_names_are_the_routers(start):
    """A client cannot choose under which name an engine keeps its response."""
    cluster = await start()
    await respond(cluster, request_id="resp_of_somebody_else")
    name = name_of(cluster.decode[0])
    assert name.startswith("resp_")
    assert name != "resp_of_somebody_else"
    assert "request_id" not in cluster.prefill[0].prefilled[0].body
    assert cluster.prefill[0].prefilled[0].body["store"] is False


@pytest.mark.parametrize("keys", [{}, {"api_keys": {"key-a": "a", "key-b": "b"}}])
async def test_a_foreign_response_is_unknown(start, keys):
    """Whoever it does not belong to hears what an engine says of one that never was, and no engine is asked."""
    cluster = await start(**keys)
    mine, theirs = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
    await respond(cluster, headers=mine)
    name = name_of(cluster.decode[0])
    for answer in (
        await respond(cluster, "more", headers=theirs, previous_response_id=name),
        await cluster.client.get(f"/v1/responses/{name}", headers=theirs),
        await cluster.client.post(f"/v1/responses/{name}/cancel", headers=theirs),
    ):
        assert (answer.status_code, answer.json()) == (404, unknown(name))
    assert len(cluster.decode[0].seen) == 1
    assert cluster.decode[0].asked == []
    assert (await cluster.client.get(f"/v1/responses/{name}", headers=mine)).status_code == 200


async def test_equal_request_ids_keep_responses_apart(start):
    """Two tenants' requests may have one id, at one time: each response has a name of its own, and its owner alone stops it."""
    cluster = await start(api_keys={"key-a": "a", "key-b": "b"})
    cluster.decode[0].gate = asyncio.Event()
    tenants = [{"Authorization": f"Bearer key-{name}", "X-Request-Id": "same"} for name in "ab"]
    asking = [
        asyncio.ensure_future(respond(cluster, headers=headers, background=True)) for headers in tenants
    ]
    await eventually(lambda: len(cluster.decode[0].answered) == 2)
    cluster.decode[0].gate.set()
    assert [answer.headers["x-request-id"] for answer in await asyncio.gather(*asking)] == ["same"] * 2
    names = {name_of(cluster.decode[0], number) for number in (0, 1)}
    assert len(names) == 2
    assert {seen.headers["x-request-id"] for seen in cluster.decode[0].answered} == {"same"}
    stopped = {
        headers["Authorization"]: {
            name
            for name in names
            if (await cluster.client.post(f"/v1/responses/{name}/cancel", headers=headers)).status_code == 200
        }
        for headers in tenants
    }
    assert sorted(map(len, stopped.values())) == [1, 1]
    assert set.union(*stopped.values()) == names


@pytest.mark.parametrize("settings", [{"max_responses": 1}, {"response_ttl_s": 0.001}])
async def test_forgotten_responses(start, settings):
    """The table is bounded, and its entries expire."""
    cluster = await start(**settings)
    await respond(cluster)
    await respond(cluster)
    answer = await respond(cluster, previous_response_id=name_of(cluster.decode[0], 0))
    assert answer.status_code == 404


async def test_not_stored(start):
    """What the client wants nobody to keep is not remembered."""
    cluster = await start()
    await respond(cluster, store=False)
    answer = await respond(cluster, previous_response_id=name_of(cluster.decode[0]))
    assert answer.status_code == 404


async def test_its_engine_is_down(start):
    """Another engine does not have it: an error that says so, and that another try may do better."""
    cluster = await start(decode=2)
    await respond(cluster)
    name = name_of(cluster.decode[0])
    cluster.decode[0].healthy = False
    await cluster.probe()
    for answer in (
        await respond(cluster, previous_response_id=name),
        await cluster.client.get(f"/v1/responses/{name}"),
    ):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "response_unreachable"
        assert answer.headers["retry-after"] == "1"
    assert cluster.decode[1].seen == []


async def test_its_engine_fails(start):
    """Nobody else can answer, so the client gets its engine's own error."""
    cluster = await start(decode=2)
    await respond(cluster)
    cluster.decode[0].failures.append(Failure(500, b"own words"))
    answer = await respond(cluster, previous_response_id=name_of(cluster.decode[0]))
    assert (answer.status_code, answer.content) == (500, b"own words")
    assert cluster.decode[1].seen == []


async def test_its_engine_drains(start):
    """An engine that is being emptied still answers for what it alone keeps."""
    cluster = await start(decode=2)
    await respond(cluster)
    cluster.app.engines.drain(cluster.urls["decode-0"], draining=True)
    assert (await respond(cluster, previous_response_id=name_of(cluster.decode[0]))).status_code == 200
    assert len(cluster.decode[0].answered) == 2


async def test_the_engine_has_forgotten_it(start):
    """Then the engine says so itself."""
    cluster = await start()
    await respond(cluster)
    cluster.decode[0].failures.append(Failure(404, b'{"error": "its own"}'))
    answer = await respond(cluster, previous_response_id=name_of(cluster.decode[0]))
    assert (answer.status_code, answer.content) == (404, b'{"error": "its own"}')


@pytest.mark.parametrize("previous", [7, ["x"], {}])
async def test_ill_formed_names(start, previous):
    """An error that names the field."""
    answer = await respond(await start(), previous_response_id=previous)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "previous_response_id"


async def test_retrieve_and_cancel(start):
    """Both go to the engine that keeps the response, byte for byte."""
    cluster = await start(decode=2)
    await respond(cluster)
    name = name_of(cluster.decode[0])
    cluster.decode[0].answer = b'{"odd":  1}'
    for answer in (
        await cluster.client.get(f"/v1/responses/{name}"),
        await cluster.client.post(f"/v1/responses/{name}/cancel"),
    ):
        assert (answer.status_code, answer.content) == (200, b'{"odd":  1}')
    assert cluster.decode[0].asked == [f"/v1/responses/{name}"]
    assert cluster.decode[0].seen[-1].path == f"/v1/responses/{name}/cancel"
    assert cluster.decode[1].seen == []


async def test_the_rest_of_a_background_stream(start):
    """The engine streams the events that are left; only what it knows of the query reaches it."""
    cluster = await start()
    await respond(cluster)
    name = name_of(cluster.decode[0])
    answer = await cluster.client.get(f"/v1/responses/{name}?stream=True&starting_after=3&x=1")
    assert answer.content == b"".join(cluster.decode[0].events)
    assert cluster.decode[0].asked == [f"/v1/responses/{name}?stream=true&starting_after=3"]


@pytest.mark.parametrize("query", ["stream=maybe", "starting_after=-1", "starting_after=x", "stream=%FF"])
async def test_wrong_queries(start, query):
    """An error in the API's shape, and no engine is asked."""
    cluster = await start()
    await respond(cluster)
    answer = await cluster.client.get(f"/v1/responses/{name_of(cluster.decode[0])}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert cluster.decode[0].asked == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses/resp_1", 404),
        ("DELETE", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/resp_1/cancel", 405),
        ("GET", "/v1/responses/a/b", 404),
        ("GET", "/v1/responses/..%2f..%2fhealth", 404),
        ("GET", "/v1/responses/" + "x" * 200, 404),
    ],
)
async def test_other_paths(start, method, path, status):
    """Nothing reaches an engine by a name that is none."""
    cluster = await start()
    assert (await cluster.client.request(method, path)).status_code == status
    assert cluster.decode[0].asked == []


async def test_background_says_its_name_at_once(start):
    """The first event passes before the engine has more to say, and the response can be asked for from then on."""
    cluster = await start()
    engine = cluster.decode[0]
    engine.gate = asyncio.Event()
    engine.events = (b"event: response.created\ndata: {}\n\n", b"event: response.completed\ndata: {}\n\n")
    body = {"model": "m", "input": "hi", "background": True, "stream": True}
    async with cluster.client.stream("POST", "/v1/responses", json=body) as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == engine.events[0]
        assert (await cluster.client.get(f"/v1/responses/{name_of(engine)}")).status_code == 200
        engine.gate.set()
        assert b"".join([chunk async for chunk in chunks]) == engine.events[1]


async def test_a_silent_engine_after_its_first_event(start):
    """The opening events are no answer: silence after them is silence before the first byte."""
    cluster = await start(decode=2, first_byte_timeout_s=0.3)
    engine = cluster.decode[0]
    engine.gate = asyncio.Event()
    engine.events = (b"event: response.created\ndata: {}\n\n", b"never")
    done = (b"event: response.completed\ndata: {}\n\n",)
    cluster.decode[1].events = done
    answer = await respond(cluster, stream=True)
    assert answer.content == done[0]
    await eventually(lambda: engine.aborted == 1)
