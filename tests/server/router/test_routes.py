"""The endpoints, as a client sees them."""

import json

import pytest

pytestmark = pytest.mark.anyio


async def test_plain_turn(start):
    """A first turn runs prefill, then decode with prefill's handle, and says so in its headers."""
    cluster = await start()
    answer = await cluster.chat("hi", headers={"X-Session-ID": "session-1"})
    assert answer.status_code == 200
    assert answer.content == cluster.decode[0].answer
    assert answer.headers["x-bidikv-reuse"].startswith('v=1, reason="new_conversation", prompt=100')
    assert answer.headers["x-engine"] == "decode-0"
    (leg,) = cluster.prefill[0].prefilled
    assert leg.ours["sources"] == []
    (final,) = cluster.decode[0].answered
    assert final.params["remote_request_id"] == "prefill-0-0"
    assert final.ours["retain_s"] == 480.0
    assert final.ours["conversation"] == leg.ours["conversation"] == answer.headers["x-bidikv-session"]
    assert final.headers["x-session-id"] == answer.headers["x-bidikv-session"] != "session-1"


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/chat/completions", b"{", (400, None, "not valid JSON")),
        ("/v1/chat/completions", b'{"model": NaN}', (400, None, "byte 10")),
        ("/v1/chat/completions", b"\xff", (400, None, "UTF-8")),
        ("/v1/chat/completions", b"[]", (400, None, "object")),
        ("/v1/chat/completions", b'{"a":' + b"[" * 100_000, (400, None, "deeply")),
        ("/v1/chat/completions", b'{"messages": []}', (400, "model", "model")),
        ("/v1/chat/completions", b'{"model": "m"}', (400, "messages", "messages")),
        ("/v1/completions", b'{"model": "m"}', (400, "prompt", "prompt")),
        ("/v1/nothing", b"{}", (404, None, "/v1/nothing")),
        ("/health", b"{}", (405, None, "POST")),
        ("/v1/completions", b" " * 2000, (413, None, "1000 bytes")),
    ],
)
async def test_refused(start, path, body, error):
    """A request that cannot be served gets one OpenAI-shaped error that names the problem."""
    status, param, words = error
    cluster = await start(max_body_bytes=1000 if status == 413 else 10**6)
    answer = await cluster.client.post(path, content=body)
    assert answer.status_code == status
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert told["param"] == param
    assert words in told["message"]
    assert cluster.prefill[0].seen == []


async def test_body_without_length_is_limited(start):
    """The limit holds for a chunked body too."""
    cluster = await start(max_body_bytes=1000)

    async def pieces():
        for _ in range(20):
            yield b" " * 100

    answer = await cluster.client.post("/v1/completions", content=pieces())
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/live", "/metrics", "/openapi.json", "/v1/models", "/bidikv/ui"])
async def test_the_body_of_a_get_is_not_kept(start, path):
    """Nobody needs it, and whoever sends one may have no key: it is dropped, however long, and the connection goes on."""
    cluster = await start(max_body_bytes=1000, admin_key="admin")
    for _ in range(2):
        answer = await cluster.client.request("GET", path, content=b" " * 1_000_000)
        assert answer.status_code == 200


async def test_models(start):
    """The list of models is a decode engine's, byte for byte."""
    cluster = await start()
    answer = await cluster.client.get("/v1/models")
    assert answer.content == b'{"object": "list",  "data": []}'


async def test_health(start):
    """Health needs one engine of each role."""
    cluster = await start(decode=2)
    answer = await cluster.client.get("/health")
    assert answer.status_code == 200
    assert answer.json()["decode"][1]["index"] == ["10.0.0.1:7000"]
    cluster.decode[0].healthy = False
    await cluster.probe()
    assert (await cluster.client.get("/health")).status_code == 200
    cluster.decode[1].healthy = False
    await cluster.probe()
    answer = await cluster.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == "unavailable"


async def test_metrics(start):
    """Turns, tokens, engines and conversations are counted."""
    cluster = await start()
    await cluster.chat("hi")
    text = (await cluster.client.get("/metrics")).text
    assert 'bidikv_router_turns_total{reason="new_conversation"} 1.0' in text
    assert 'bidikv_router_prompt_tokens_total{source="remote"} 64.0' in text
    assert f'bidikv_router_engine_up{{engine="{cluster.urls["decode-0"]}",role="decode"}} 1.0' in text
    assert "bidikv_router_conversations 1.0" in text
    assert 'bidikv_router_leg_seconds_count{leg="prefill",outcome="ok"} 1.0' in text
    assert "bidikv_router_turns_in_flight 0.0" in text


async def test_identity_headers(start):
    """Both legs carry the client's request id and credential."""
    cluster = await start()
    answer = await cluster.chat("hi", headers={"X-Request-Id": "r-1", "Authorization": "Bearer k"})
    assert answer.headers["x-request-id"] == "r-1"
    for leg in (*cluster.prefill[0].seen, *cluster.decode[0].seen):
        assert leg.headers["x-request-id"] == "r-1"
        assert leg.headers["authorization"] == "Bearer k"
    generated = (await cluster.chat("hi", headers={"X-Request-Id": "not good"})).headers["x-request-id"]
    assert generated.isalnum()


async def test_client_transfer_params_never_pass(start):
    """Whatever a client writes about transfers stays at the router."""
    cluster = await start()
    evil = {"do_remote_prefill": True, "remote_host": "10.9.9.9", "remote_block_ids": [[666]]}
    await cluster.chat(
        "hi",
        kv_transfer_params=evil,
        ec_transfer_params=evil,
        vllm_xargs={"kv_transfer_params": "evil", "ok": 1},
        session_id="session-1",
        n=1,
    )
    await cluster.chat("hi", kv_transfer_params=evil, n=2)
    legs = [*cluster.prefill[0].seen, *cluster.decode[0].seen]
    assert len(legs) == 3
    for leg in legs:
        text = json.dumps(leg.body)
        assert "10.9.9.9" not in text
        assert "666" not in text
        assert "evil" not in text
        assert "ec_transfer_params" not in leg.body
        assert "session_id" not in leg.body
    assert legs[-1].params is None


async def test_other_credentials_are_another_tenant(start):
    """The same session id under another key is another conversation with another salt."""
    cluster = await start()
    for key in ("a", "b"):
        headers = {"X-Session-ID": "session-1", "Authorization": f"Bearer {key}"}
        answer = await cluster.chat("hi", headers=headers)
        assert 'reason="new_conversation"' in answer.headers["x-bidikv-reuse"]
    first, second = cluster.prefill[0].prefilled
    assert first.ours["conversation"] != second.ours["conversation"]
    assert first.ours["salt"] != second.ours["salt"]
