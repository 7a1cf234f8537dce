"""Tenants by API key: who gets in, what engines see, and that no key is ever shown."""

import hashlib
import logging
import os

import pytest
from fake_engine import Failure

from bidikv_server.router.access import Access, KeyFile
from bidikv_server.router.settings import RouterSettings, SettingsError

pytestmark = pytest.mark.anyio

KEYS = {"sk-alice-1": "alice", "sk-alice-2": "alice", "sk-bob-1": "bob"}
SESSION = {"X-Session-ID": "session-1"}


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **SESSION, **headers}


@pytest.fixture
def key_file(tmp_path):
    def write(text: str):
        path = tmp_path / "keys.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer sk-eve-1"}, {"Authorization": "Basic sk-alice-1"}]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models"])
async def test_without_a_known_key(start, path, headers):
    """Everything under /v1 needs a key, and says so in OpenAI's shape before it reads a body or asks an engine."""
    cluster = await start(api_keys=KEYS)
    method = "GET" if path == "/v1/models" else "POST"
    answer = await cluster.client.request(method, path, headers=headers)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_api_key",
        None,
    )
    assert "eve" not in answer.text
    assert answer.headers["www-authenticate"] == "Bearer"
    assert cluster.prefill[0].seen == cluster.decode[0].seen == []


async def test_open_endpoints_stay_open(start):
    """Health and metrics name no tenant and need no key."""
    cluster = await start(api_keys=KEYS)
    for path in ("/health", "/metrics"):
        assert (await cluster.client.get(path)).status_code == 200


async def test_two_keys_of_one_tenant_share(start):
    """A tenant's keys reach the same conversation, whichever header carries them."""
    cluster = await start(api_keys=KEYS)
    await cluster.chat("hi", headers=bearer("sk-alice-1"))
    answer = await cluster.chat("hi", "Hello", "more", headers={"x-api-key": "sk-alice-2", **SESSION})
    assert 'reason="hit"' in answer.headers["x-bidikv-reuse"]
    first, second = cluster.prefill[0].prefilled
    for name in ("conversation", "salt"):
        assert first.ours[name] == second.ours[name]


async def test_two_tenants_share_nothing(start):
    """Neither conversation, nor retained blocks, nor an engine's own prefix cache."""
    cluster = await start(api_keys=KEYS)
    await cluster.chat("hi", headers=bearer("sk-alice-1"))
    answer = await cluster.chat("hi", "Hello", "more", headers=bearer("sk-bob-1"))
    assert 'reason="new_conversation"' in answer.headers["x-bidikv-reuse"]
    first, second = cluster.prefill[0].prefilled
    for name in ("conversation", "salt"):
        assert first.ours[name] != second.ours[name]
    assert first.body["cache_salt"] != second.body["cache_salt"]


async def test_cache_salt_on_both_legs(start):
    """Made of tenant and the client's own salt, the same on both legs, and another for another salt."""
    cluster = await start(api_keys=KEYS)
    for salt in ({}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "yours"}):
        assert (await cluster.chat("hi", headers=bearer("sk-bob-1"), **salt)).status_code == 200
    prefill, decode = (
        [leg.body["cache_salt"] for leg in legs]
        for legs in (cluster.prefill[0].prefilled, cluster.decode[0].answered)
    )
    assert prefill == decode
    assert len(set(prefill)) == 3
    assert prefill[1] == prefill[2]
    assert not {"mine", "yours"} & set(prefill)


async def test_without_tenants_salts_pass(start):
    """Nothing is added while no API keys are configured."""
    cluster = await start()
    await cluster.chat("hi")
    await cluster.chat("hi", cache_salt="mine")
    assert [leg.body.get("cache_salt") for leg in cluster.decode[0].answered] == [None, "mine"]


@pytest.mark.parametrize("salt", ["", 5, ["x"]])
async def test_ill_typed_salt(start, salt):
    """What engines would refuse is refused here, since they do not see it."""
    cluster = await start(api_keys=KEYS)
    answer = await cluster.chat("hi", headers=bearer("sk-bob-1"), cache_salt=salt)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, "Bearer sk-alice-1"),
        ({"upstream_api_key": "sk-up"}, "Bearer sk-up"),
        ({"api_keys": KEYS}, None),
        ({"api_keys": KEYS, "upstream_api_key": "sk-up"}, "Bearer sk-up"),
    ],
)
async def test_what_engines_get(start, settings, seen):
    """The router's own credential in place of the client's; with API keys never the client's."""
    cluster = await start(**settings)
    trace = {"traceparent": "00-1"}
    await cluster.chat("hi", headers={**bearer("sk-alice-1"), **trace, "x-api-key": "sk-alice-1"})
    legs = [*cluster.prefill[0].seen, *cluster.decode[0].seen]
    assert len(legs) == 2
    for leg in legs:
        assert leg.headers.get("authorization") == seen
        assert leg.headers["traceparent"] == "00-1"
        assert "x-api-key" not in leg.headers


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [401, 403])
async def test_engines_refuse_the_router(start, caplog, role, status):
    """A client does not get to hear that its key is wrong when it is the router's."""
    cluster = await start(api_keys=KEYS, upstream_api_key="sk-up")
    getattr(cluster, role)[0].failures.append(Failure(status, b"sk-up is wrong"))
    answer = await cluster.chat("hi", headers=bearer("sk-alice-1"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_refuses_router")
    assert "check upstream_api_key" in caplog.text
    assert "sk-" not in answer.text + caplog.text


async def test_engines_refuse_the_client(start):
    """Where engines check the client's own credential, their verdict is the client's to hear."""
    cluster = await start()
    cluster.decode[0].failures.append(Failure(401, b"no"))
    answer = await cluster.chat("hi", headers=bearer("sk-alice-1"))
    assert (answer.status_code, answer.content) == (401, b"no")


async def test_no_key_is_ever_shown(start, caplog):
    """Not in logs, metrics, answers or the settings' text, whether the key is good or not."""
    caplog.set_level(logging.DEBUG)
    digest = hashlib.sha256(b"sk-alice-1").hexdigest()
    settings = {"api_keys": KEYS, "api_key": "sk-one", "upstream_api_key": "sk-up"}
    cluster = await start(**settings)
    told = []
    for key in ("sk-alice-1", "sk-one", "sk-eve-1"):
        answer = await cluster.chat("hi", headers=bearer(key))
        told.append(answer.text + str(answer.headers))
    told.append((await cluster.chat("hi", headers=bearer("sk-alice-1"), model=None)).text)
    told += [(await cluster.client.get(path)).text for path in ("/metrics", "/health")]
    shown = RouterSettings(prefill=("http://p",), decode=("http://d",), **settings)
    told += [repr(shown), str(shown.model_dump()), shown.model_dump_json(), caplog.text]
    for text in told:
        assert "sk-" not in text
        assert digest not in text


def test_key_file_is_read_again(key_file, caplog):
    """A changed file counts within a second; one that cannot be used leaves the keys as they were."""
    now_s = 0.0
    path = key_file('sk-1 = "a"')
    keys = KeyFile(path, clock=lambda: now_s)
    for step, (text, known) in enumerate(
        [('sk-12 = "b"', "sk-12"), ("sk-123 = broken", "sk-12"), ("", "sk-12"), ('sk-1234 = "c"', "sk-1234")],
        1,
    ):
        key_file(text)
        os.utime(path, (step, step))
        now_s += 0.9
        before = keys.ring()
        now_s += 0.2
        assert keys.ring().tenant_of(known)
        assert before == keys.ring() or text in {'sk-12 = "b"', 'sk-1234 = "c"'}
    path.unlink()
    now_s += 2
    assert keys.ring().tenant_of("sk-1234") == "c"
    assert caplog.text.count("its earlier keys stay") == 3
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sk-secret = = 1", "is not valid TOML"),
        ('sk-secret = "a"\nsk-secret = "a"', "is not valid TOML"),
        ("sk-secret = 1", "entry 1"),
        ("", "at least one"),
        (None, "cannot read"),
    ],
)
def test_bad_key_file(key_file, tmp_path, text, message):
    """At start such a file is an error that names the setting and the path, and shows nothing of its content."""
    path = key_file(text) if text is not None else tmp_path / "missing"
    settings = RouterSettings(prefill=("http://p",), decode=("http://d",), api_keys_file=path)
    with pytest.raises(SettingsError, match=f"^api_keys_file: .*{message}") as caught:
        Access(settings)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value).replace(str(path), "")


def test_sources_of_keys(key_file, monkeypatch):
    """The file, the table and the one key of the environment together; a table does not fit into a variable."""
    monkeypatch.setenv("BIDIKV_ROUTER_API_KEY", "sk-one")
    engines = {"prefill": "http://p", "decode": "http://d"}
    settings = RouterSettings.load(
        None, **engines, api_keys={"sk-table": "t"}, api_keys_file=key_file('sk-file = "f"\nsk-table = "f"')
    )
    access = Access(settings)
    tenants = {key: access.tenant({"x-api-key": key}) for key in ("sk-one", "sk-table", "sk-file")}
    assert tenants == {"sk-one": "default", "sk-table": "t", "sk-file": "f"}
    monkeypatch.setenv("BIDIKV_ROUTER_API_KEYS", '{"sk-secret": "a"}')
    with pytest.raises(SettingsError, match=r"^api_keys: is a table") as caught:
        RouterSettings.load(None, **engines)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api_keys": {"sk-secret": "a b"}}, "^api_keys: entry 1: a tenant's name"),
        ({"api_key": "sk-sécret"}, "^api_key: a key has"),
        ({"api_key": 1}, "^api_key: a key has"),
        ({"upstream_api_key": ""}, "^upstream_api_key: a key has"),
        ({"upstream_api_key": "sha256:secret"}, "^upstream_api_key: is sent"),
    ],
)
def test_wrong_settings(values, message):
    """The setting is named, the secret is not."""
    with pytest.raises(SettingsError, match=message) as caught:
        RouterSettings.load(None, prefill="http://p", decode="http://d", **values)
    assert "cret" not in str(caught.value)
