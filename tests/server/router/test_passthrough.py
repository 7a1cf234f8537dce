"""Endpoints that any decode engine answers."""

import pytest
from fake_engine import Failure

from bidikv_server.router.core.engines import Role

pytestmark = pytest.mark.anyio

PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


@pytest.mark.parametrize("path", PATHS)
async def test_passes_untouched(start, path):
    """Body and answer as they are, from the least busy decode engine."""
    cluster = await start(decode=2)
    cluster.app.engines.leg_started(cluster.urls["decode-0"], Role.DECODE)
    cluster.decode[1].answer = b'{"count": 3,  "tokens": [1]}'
    answer = await cluster.client.post(path, content=b'{"prompt":  "x"}')
    assert (answer.status_code, answer.content) == (200, b'{"count": 3,  "tokens": [1]}')
    (seen,) = cluster.decode[1].seen
    assert (seen.path, seen.body) == (path, {"prompt": "x"})
    assert cluster.decode[0].seen == cluster.prefill[0].seen == []


@pytest.mark.parametrize("path", PATHS)
async def test_needs_a_key(start, path):
    """Like every endpoint that works for a tenant; engines do not see it."""
    cluster = await start(api_keys={"key-a": "a"}, upstream_api_key="ours")
    assert (await cluster.client.post(path, json={})).status_code == 401
    assert cluster.decode[0].seen == []
    await cluster.client.post(path, json={}, headers={"Authorization": "Bearer key-a"})
    assert cluster.decode[0].seen[0].headers["authorization"] == "Bearer ours"


@pytest.mark.parametrize("path", PATHS)
async def test_engines_errors_pass(start, path):
    """With status and bytes."""
    cluster = await start()
    cluster.decode[0].failures.append(Failure(400, b'{"odd":  1}'))
    answer = await cluster.client.post(path, json={})
    assert (answer.status_code, answer.content) == (400, b'{"odd":  1}')


async def test_an_engine_that_cannot_be_reached(start):
    """The next one answers; without any, the error has the API's shape."""
    cluster = await start(decode_before=("http://127.0.0.1:9",))
    cluster.app.engines.probe_passed("http://127.0.0.1:9", Role.DECODE, None)
    assert (await cluster.client.post("/tokenize", json={})).status_code == 200
    cluster.decode[0].healthy = False
    await cluster.probe()
    answer = await cluster.client.post("/v1/messages/count_tokens", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_an_engine_that_refuses_the_router(start):
    """That is between the two of them."""
    cluster = await start(upstream_api_key="stale")
    cluster.decode[0].failures.append(Failure(401))
    answer = await cluster.client.post("/tokenize", json={})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_refuses_router"


async def test_open_endpoints(start):
    """Health and metrics need no key; nothing else is open by accident."""
    cluster = await start(api_keys={"key-a": "a"})
    for path in ("/health", "/ready", "/metrics"):
        assert (await cluster.client.get(path)).status_code == 200
    assert (await cluster.client.get("/v1/models")).status_code == 401
    assert (await cluster.client.get("/v1/responses/resp_1")).status_code == 401
