"""What callers may ask of their own conversations, and that they reach nobody else's."""

import json

import pytest

from bidikv_server.connector import messages

pytestmark = pytest.mark.anyio

KEYS = {"sk-alice-1": "alice", "sk-alice-2": "alice", "sk-bob-1": "bob"}
OWN = "/v1/bidikv/conversations"
UNKNOWN = "0" * 32


def bearer(key: str | None) -> dict[str, str]:
    return {"X-Session-ID": "session-1"} | ({"Authorization": f"Bearer {key}"} if key else {})


async def talk(cluster, key: str | None) -> str:
    """One turn; returns its conversation's key."""
    answer = await cluster.chat("hi", headers=bearer(key))
    assert answer.status_code == 200
    return answer.headers["x-bidikv-session"]


@pytest.mark.parametrize(
    ("settings", "own", "others"),
    [
        ({}, ["sk-1"], ["sk-2", None]),
        ({}, [None], ["sk-1"]),
        ({"api_keys": KEYS}, ["sk-alice-1", "sk-alice-2"], ["sk-bob-1"]),
        ({"admin_key": "sk-admin"}, ["sk-1"], ["sk-admin", None]),
    ],
)
async def test_only_its_own_caller_reaches_a_conversation(start, settings, own, others):
    """With the credential of its turns, or of the same tenant; to all others it is as unknown as any other key."""
    cluster = await start(**settings)
    key = await talk(cluster, own[0])
    unknown = (await cluster.client.get(f"{OWN}/{UNKNOWN}", headers=bearer(own[0]))).json()
    for other in others:
        for method, path, body in (("GET", "", None), ("DELETE", "", None), ("POST", "/wait", {"wait_s": 1})):
            answer = await cluster.client.request(
                method, f"{OWN}/{key}{path}", headers=bearer(other), json=body
            )
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == unknown["error"]["message"].replace(UNKNOWN, key)
    for caller in own:
        explained = (await cluster.client.get(f"{OWN}/{key}", headers=bearer(caller))).json()
        assert [turn["reason"] for turn in explained["recent"]] == ["new_conversation"]
    # Restarted since, so that nobody has to be told.
    cluster.decode[0].publish_index("reborn", "10.0.0.0:7000")
    await cluster.probe()
    released = await cluster.client.delete(f"{OWN}/{key}", headers=bearer(own[-1]))
    assert released.json() == {"key": key, "forgotten": True, "decode": {}}
    assert len(cluster.app.table) == 0


@pytest.mark.parametrize("settings", [{}, {"api_keys": KEYS}])
async def test_a_credential_in_anthropics_header(start, settings):
    """Turns of the Messages API are their caller's own, too."""
    cluster = await start(**settings)
    headers = {"x-api-key": "sk-alice-1"}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    answer = await cluster.client.post("/v1/messages", json=body, headers=headers)
    path = f"{OWN}/{answer.headers['x-bidikv-session']}"
    assert (await cluster.client.get(path, headers=headers)).status_code == 200
    for other in ({"x-api-key": "sk-bob-1"}, *([] if settings else [{}])):
        assert (await cluster.client.get(path, headers=other)).status_code == 404


async def test_unknown_keys_of_an_api(start):
    """With API keys, a caller without one is told so before anything else."""
    cluster = await start(api_keys=KEYS)
    for headers in ({}, {"Authorization": "Bearer sk-eve"}):
        answer = await cluster.client.get(f"{OWN}/{UNKNOWN}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"/{UNKNOWN}/wait", 405),
        ("PUT", f"/{UNKNOWN}", 405),
        ("GET", "", 404),
        ("GET", "/" + "0" * 31, 404),
        ("GET", f"/{UNKNOWN}/", 404),
        ("GET", f"/{UNKNOWN}/../x", 404),
    ],
)
async def test_other_paths_and_methods(start, method, path, status):
    """Nobody lists here, and there are no other endpoints."""
    cluster = await start()
    answer = await cluster.client.request(method, OWN + path)
    assert answer.status_code == status


async def test_wait(start, serve_index, holding):
    """Decode keeps what it holds for as long as the tool takes, and no longer than a hint may ask for."""
    asked, indexes = [], []

    def answer(data):
        asked.append(messages.decode(data))
        return indexes[0].answer(data)

    address = serve_index(answer)
    cluster = await start(secret="shared", default_ttl_s=50.0, max_ttl_s=100.0)
    cluster.decode[0].publish_index("id", address)
    await cluster.probe()
    key = await talk(cluster, "sk-1")
    indexes.append(holding())
    for held, outcome in ((None, "not_held"), (key, "renewed")):
        indexes[0] = holding(held)
        reply = await cluster.client.post(f"{OWN}/{key}/wait", headers=bearer("sk-1"), json={"wait_s": 500})
        assert reply.json() == {"key": key, "wait_s": 100.0, "decode": {address: outcome}}
    assert [(m.conversation, m.ttl_s) for m in asked] == [(key, 100.0)] * 2
    assert list(indexes[0].take_changes()) == [key]


_NO_JSON = {b"", b"{", b'{"wait_s": 1e999}'}
"""Not even JSON, or a number that no JSON number may be."""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"wait_s": 0}',
        b'{"wait_s": true}',
        b'{"wait_s": 1e999}',
        b'{"wait_s": "1"}',
    ],
)
async def test_wrong_waits(start, body):
    """A wait that is none names its field."""
    cluster = await start()
    key = await talk(cluster, None)
    answer = await cluster.client.post(f"{OWN}/{key}/wait", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == (None if body in _NO_JSON else "wait_s")
    assert json.dumps(error)
