"""The admin API: who may call it, what it shows, and what it does."""

import asyncio
import contextlib
import hashlib
import logging
import re
import sys
import time

import pytest
from fake_engine import eventually

from bidikv_server.router.core.engines import Role

pytestmark = pytest.mark.anyio

ADMIN = {"Authorization": "Bearer sk-admin"}
KEYS = {"sk-alice-1": "alice", "sk-alice-2": "alice", "sk-bob-1": "bob"}
UNKNOWN = "0" * 32
LIST = "/bidikv/v1/conversations"
ADMIN_ONLY = [
    ("POST", "/bidikv/v1/engines/drain"),
    ("POST", "/bidikv/v1/engines/undrain"),
    ("GET", "/bidikv/v1/config"),
    ("GET", "/bidikv/v1/overview"),
    ("GET", "/bidikv/v1/engines"),
    ("GET", "/bidikv/v1/turns"),
]
FOR_TENANTS = [("GET", LIST), ("GET", f"{LIST}/{UNKNOWN}"), ("DELETE", f"{LIST}/{UNKNOWN}")]


def bearer(key: str, session: str = "session-1") -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "X-Session-ID": session}


async def talk(cluster, *contents, key="sk-alice-1", session="session-1", **fields) -> str:
    """One turn; returns its conversation's key."""
    answer = await cluster.chat(*contents, headers=bearer(key, session), **fields)
    assert answer.status_code == 200
    return answer.headers["x-bidikv-session"]


@pytest.mark.parametrize(
    ("method", "path"), [*ADMIN_ONLY, *FOR_TENANTS, ("PUT", LIST), ("GET", "/bidikv/v1/x")]
)
async def test_without_an_admin_key_there_is_none(start, method, path):
    """Not configured, the API answers as any path that does not exist, to every key and method."""
    cluster = await start()
    missing = (await cluster.client.get("/bidikv/v1/nothing", headers=ADMIN)).json()
    for headers in ({}, ADMIN):
        answer = await cluster.client.request(method, path, headers=headers)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == missing["error"]["message"].replace(
            "/bidikv/v1/nothing", path
        )


@pytest.mark.parametrize("settings", [{}, {"api_keys": KEYS}])
@pytest.mark.parametrize(("method", "path"), [*ADMIN_ONLY, *FOR_TENANTS])
async def test_wrong_key(start, method, path, settings):
    """No key, a wrong one and, for what is the administrator's, a tenant's: 401, before a body is read."""
    cluster = await start(admin_key="sk-admin", **settings)
    keys = ["sk-eve", "sk-admi", "sk-admin1"] + (["sk-bob-1"] if (method, path) in ADMIN_ONLY else [])
    for headers in ({}, *({"Authorization": f"Bearer {key}"} for key in keys)):
        answer = await cluster.client.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "sk-" not in answer.text


async def test_tenants_without_an_admin_key(start):
    """Tenants manage their conversations; the rest stays away, and other methods are told apart only for them."""
    cluster = await start(api_keys=KEYS)
    key = await talk(cluster, "hi")
    own = {"Authorization": "Bearer sk-alice-2"}
    assert (await cluster.client.get(f"{LIST}/{key}", headers=own)).status_code == 200
    assert (await cluster.client.put(LIST, headers=own)).status_code == 405
    assert (await cluster.client.put(LIST)).status_code == 401
    for method, path in ADMIN_ONLY:
        assert (await cluster.client.request(method, path, headers=own)).status_code == 404


async def test_admin_key(start):
    """The administrator's key opens no turns; it may be given by its digest."""
    cluster = await start(api_keys=KEYS, admin_key="sk-admin")
    assert (await cluster.chat("hi", headers=ADMIN)).status_code == 401
    by_digest = await start(admin_key="sha256:" + hashlib.sha256(b"sk-admin").hexdigest())
    for headers, status in ((ADMIN, 200), ({"x-api-key": "sk-admin"}, 200), ({"x-api-key": "sk-adm"}, 401)):
        assert (await by_digest.client.get(LIST, headers=headers)).status_code == status


async def test_list(start):
    """Newest first, with what an operator looks for, page by page, of one tenant or all."""
    cluster = await start(api_keys=KEYS, admin_key="sk-admin")
    first = await talk(cluster, "hi")
    second = await talk(cluster, "hi", key="sk-bob-1")
    third = await talk(cluster, "hi", session="session-2")
    await talk(cluster, "hi", "Hello", "more")
    listed = (await cluster.client.get(LIST, headers=ADMIN)).json()
    assert [c["key"] for c in listed["data"]] == [first, third, second]
    assert (listed["has_more"], listed["next_before"]) == (False, None)
    top = listed["data"][0]
    assert 0 <= top.pop("idle_s") < 5
    assert 0 < top["latest"].pop("ttft_s") < 5
    assert top.pop("latest") == {
        "reason": "hit", "prompt_tokens": 100, "remote_tokens": 64, "local_tokens": 16, "computed_tokens": 20,
    }  # fmt: skip
    assert top == {
        "key": first, "tenant": "alice", "model": "m", "turns": 2, "decode": cluster.urls["decode-0"],
    }  # fmt: skip
    page = (await cluster.client.get(LIST, params={"limit": 1}, headers=ADMIN)).json()
    assert page["has_more"]
    rest = {"limit": 2, "before": page["next_before"]}
    page = (await cluster.client.get(LIST, params=rest, headers=ADMIN)).json()
    assert [c["key"] for c in page["data"]] == [third, second]
    page = (await cluster.client.get(LIST, params={"tenant": "bob"}, headers=ADMIN)).json()
    assert [c["key"] for c in page["data"]] == [second]


@pytest.mark.parametrize(
    ("params", "param"),
    [({"limit": "0"}, "limit"), ({"limit": "1001"}, "limit"), ({"limit": "x"}, "limit"), ({"before": "-1"}, "before"),
     ({"before": ""}, "before"), ({"before": "9" * 30}, "before")],
)  # fmt: skip
async def test_wrong_page(start, params, param):
    """The parameter at fault is named."""
    cluster = await start(admin_key="sk-admin")
    answer = await cluster.client.get(LIST, params=params, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_explain(start):
    """The turns as a tree, and of each of the last ones what was reused, where, how fast and what to change."""
    cluster = await start(decode=2, admin_key="sk-admin", max_records=3)
    key = await talk(cluster, "hi")
    cluster.prefill[0].account = {
        **cluster.prefill[0].account, "reason": "hit_diverged", "diverged_at_token": 1234,
    }  # fmt: skip
    await talk(cluster, "hi", "Hello", "more")
    await talk(cluster, "hi", "Hello", "other")
    await talk(cluster, "hi", n=2)
    told = (await cluster.client.get(f"{LIST}/{key}", headers=ADMIN)).json()
    root, one, two = told["tree"]
    assert root["parent"] is None
    assert one["parent"] == two["parent"] == root["turn"]
    assert [turn["messages"] for turn in told["tree"]] == [1, 3, 3]
    assert told["turns"] == 3
    alone, last, before = told["recent"]
    assert abs(last.pop("time_s") - time.time()) < 5
    assert 0 < last.pop("ttft_s") < 5
    assert "at prompt token 1,234" in last.pop("advice")
    assert last == {
        "turn": two["turn"], "reason": "hit_diverged", "prompt_tokens": 100, "remote_tokens": 64, "local_tokens": 16,
        "computed_tokens": 20, "diverged_at_token": 1234, "prefill": cluster.urls["prefill-0"],
        "decode": cluster.urls["decode-0"], "placement": "home", "prefill_choice": "only", "mode": "readback", "mode_reason": "fixed",
    }  # fmt: skip
    assert before["turn"] == one["turn"]
    assert (alone["reason"], alone["prefill"], alone["prompt_tokens"]) == ("unsupported", None, 9)
    assert (alone["prefill_choice"], alone["mode"], alone["mode_reason"]) == ("none", "alone", "only_way")


async def test_what_is_not_a_turn_is_not_told(start):
    """Auxiliary turns and those that failed leave no conversation behind."""
    cluster = await start(admin_key="sk-admin")
    await cluster.chat("hi", headers={"x-bidikv-turn": "v=1, k=aux"})
    cluster.decode[0].events = (b'data: {"error": {"message": "no"}}\n\n',)
    await cluster.chat("hi", stream=True)
    assert (await cluster.client.get(LIST, headers=ADMIN)).json()["data"] == []


async def test_a_tenant_sees_only_its_own(start):
    """Listing, explaining and releasing end at the tenant; a foreign conversation is as unknown as none."""
    cluster = await start(api_keys=KEYS, admin_key="sk-admin")
    own, foreign = await talk(cluster, "hi"), await talk(cluster, "hi", key="sk-bob-1")
    alice = {"Authorization": "Bearer sk-alice-2"}
    for params in ({}, {"tenant": "bob"}):
        listed = (await cluster.client.get(LIST, params=params, headers=alice)).json()
        assert [c["key"] for c in listed["data"]] == [own]
    for method in ("GET", "DELETE"):
        answers = [
            await cluster.client.request(method, f"{LIST}/{key}", headers=alice) for key in (foreign, UNKNOWN)
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace(foreign, UNKNOWN) == answers[1].text
        assert {name for name, _ in answers[0].headers.items()} == {
            name for name, _ in answers[1].headers.items()
        }
    assert (await cluster.client.get(f"{LIST}/{foreign}", headers=ADMIN)).status_code == 200


async def test_a_foreign_conversation_costs_what_an_unknown_one_does(start):
    """The router does the same for both, line by line: neither answer nor time tells a tenant which one exists."""
    cluster = await start(api_keys=KEYS, admin_key="sk-admin")
    await talk(cluster, "hi")
    foreign = await talk(cluster, "hi", key="sk-bob-1")
    alice = {"Authorization": "Bearer sk-alice-2"}
    for method in ("GET", "DELETE", "PUT", "POST"):
        told = []
        for key in (foreign, UNKNOWN):
            with traced() as lines:
                answer = await cluster.client.request(method, f"{LIST}/{key}", headers=alice)
            told.append((lines, answer.status_code, answer.text.replace(key, ""), sorted(answer.headers)))
        assert told[0] == told[1]
        assert any("find" in line for line in told[0][0]) == (method in {"GET", "DELETE"})
    known = await cluster.client.get(f"{LIST}/{foreign}", headers=ADMIN)
    assert known.status_code == 200


def sweeps(frame) -> bool:
    """Whether this is the store's own looking for idle conversations, which goes on all the time."""
    return frame is not None and (frame.f_code.co_name == "_sweep" or sweeps(frame.f_back))


@contextlib.contextmanager
def traced():
    """Lines of the admin API and of what it looks into, in the order in which they run."""
    lines = []

    def each_line(frame, event, _argument):
        if event == "line":
            lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        return each_line

    def each_call(frame, _event, _argument):
        watched = frame.f_code.co_filename.endswith(
            ("router/admin.py", "core/history.py", "router/access.py")
        )
        return each_line if watched and not sweeps(frame) else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    "path", [f"{LIST}/", f"{LIST}/abc", f"{LIST}/{UNKNOWN}/x", f"{LIST}/{UNKNOWN.upper()}G"]
)
async def test_ill_formed_keys(start, path):
    """What cannot be a conversation's key is no endpoint."""
    cluster = await start(admin_key="sk-admin")
    assert (await cluster.client.get(path, headers=ADMIN)).status_code == 404


async def test_release(start, serve_index, holding):
    """The conversation is forgotten here and on decode: its next turn begins anew."""
    indexes = []

    def answer(data):
        return indexes[0].answer(data)

    address = serve_index(answer)
    cluster = await start(decode=2, api_keys=KEYS, secret="shared")
    cluster.decode[0].publish_index("id", address)
    await cluster.probe()
    key = await talk(cluster, "hi")
    index = holding(key)
    indexes.append(index)
    own = {"Authorization": "Bearer sk-alice-1"}
    answer = await cluster.client.delete(f"{LIST}/{key}", headers=own)
    assert answer.json() == {"key": key, "forgotten": True, "decode": {address: "released"}}
    assert index.take_changes() == {key: None}
    assert (await cluster.client.delete(f"{LIST}/{key}", headers=own)).status_code == 404
    assert len(cluster.app.table) == 0
    await talk(cluster, "hi", "Hello", "more")
    assert cluster.prefill[0].prefilled[1].ours["sources"] == []


async def test_release_of_what_a_lost_engine_held(start):
    """An engine that was restarted since is not told: it holds nothing of this."""
    cluster = await start(admin_key="sk-admin")
    key = await talk(cluster, "hi")
    cluster.decode[0].publish_index("reborn", "10.0.0.0:7000")
    await cluster.probe()
    answer = await cluster.client.delete(f"{LIST}/{key}", headers=ADMIN)
    assert answer.json() == {"key": key, "forgotten": True, "decode": {}}


async def test_drain_and_undrain(start):
    """A draining engine ends what it has; its conversations are read back from it and live elsewhere from then on."""
    cluster = await start(decode=2, admin_key="sk-admin")
    url = cluster.urls["decode-0"]
    cluster.decode[0].gate = asyncio.Event()
    running = asyncio.ensure_future(cluster.chat("hi", headers=bearer("k"), stream=True))
    await eventually(lambda: cluster.decode[0].answered)
    answer = await cluster.client.post("/bidikv/v1/engines/drain", json={"url": url + "/"}, headers=ADMIN)
    assert answer.json() == {
        "url": url, "draining": True, "engines": [{"role": "decode", "healthy": True, "in_flight": 1}],
    }  # fmt: skip
    await cluster.chat("something else")
    assert not running.done()
    cluster.decode[0].gate.set()
    assert (await running).content.endswith(b"[DONE]\n\n")
    moved = await cluster.chat("hi", "Hello", "more", headers=bearer("k"))
    assert cluster.prefill[0].prefilled[-1].ours["sources"] == ["10.0.0.0:7000"]
    assert 'reason="hit"' in moved.headers["x-bidikv-reuse"]
    assert [len(engine.answered) for engine in cluster.decode] == [1, 2]
    key = moved.headers["x-bidikv-session"]
    told = (await cluster.client.get(f"{LIST}/{key}", headers=ADMIN)).json()
    assert [turn["placement"] for turn in told["recent"]] == ["draining", "least_loaded"]
    health = (await cluster.client.get("/health")).json()
    assert [engine["draining"] for engine in health["decode"]] == [True, False]
    metrics = (await cluster.client.get("/metrics")).text
    assert f'bidikv_router_engine_draining{{engine="{url}",role="decode"}} 1.0' in metrics
    assert 'bidikv_router_placements_total{reason="draining"} 1.0' in metrics
    await cluster.client.post("/bidikv/v1/engines/undrain", json={"url": url}, headers=ADMIN)
    cluster.app.engines.leg_started(cluster.urls["decode-1"], Role.DECODE)
    await cluster.chat("a third")
    await cluster.chat("hi", "Hello", "more", "Hello", "again", headers=bearer("k"))
    assert [len(engine.answered) for engine in cluster.decode] == [2, 3]


async def test_the_last_engine_drains(start):
    """With nothing else up, new turns are refused with a hint to come back."""
    cluster = await start(admin_key="sk-admin")
    url = cluster.urls["decode-0"]
    await cluster.client.post("/bidikv/v1/engines/drain", json={"url": url}, headers=ADMIN)
    answer = await cluster.chat("hi")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [(b"{", 400, None), (b"[" * 100_000, 400, None), (b"[]", 400, "url"), (b'{"url": 1}', 400, "url"),
     (b'{"url": "http://other"}', 404, "url")],
)  # fmt: skip
async def test_wrong_drain(start, body, status, param):
    """What cannot be drained is named."""
    cluster = await start(admin_key="sk-admin")
    answer = await cluster.client.post("/bidikv/v1/engines/drain", content=body, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_config(start, caplog):
    """Every setting in effect; of secrets only that they are set; no key in logs either."""
    caplog.set_level(logging.DEBUG)
    cluster = await start(
        api_keys=KEYS, api_key="sk-one", admin_key="sk-admin", upstream_api_key="sk-up", secret="sk-side",
        state_url="redis://user:sk-url@127.0.0.1:9/0?client_name=sk-option", state_password="sk-state",
    )  # fmt: skip
    answer = await cluster.client.get("/bidikv/v1/config", headers=ADMIN)
    told = answer.json()
    assert told["probe_interval_s"] == 600.0
    assert told["prefill"] == [cluster.urls["prefill-0"]]
    assert told["api_keys"] == {"alice": 2, "bob": 1, "default": 1}
    secrets = ("api_key", "admin_key", "upstream_api_key", "secret", "state_password")
    assert {told[name] for name in secrets} == {"**********"}
    assert told["state_url"] == "redis://user:**********@127.0.0.1:9/0"
    assert "the shared state at redis://127.0.0.1:9/0 is down" in caplog.text
    assert "sk-" not in answer.text + caplog.text


async def test_overview(start):
    """The router at a glance: counts since its start."""
    cluster = await start(admin_key="sk-admin")
    await cluster.chat("hi")
    await cluster.chat("hi", "Hello", "more")
    await cluster.client.post("/v1/completions", content=b"{}")
    told = (await cluster.client.get("/bidikv/v1/overview", headers=ADMIN)).json()
    assert 0 < told.pop("uptime_s") < 60
    assert re.fullmatch(r"\d+\.\d+\S*", told.pop("version"))
    assert told == {
        "phase": "serving", "conversations": 1, "turns_in_flight": 0, "turns_queued": 0,
        "turns": {"new_conversation": 1, "hit": 1}, "failed_turns": {},
        "prompt_tokens": {"remote": 128, "local": 32, "computed": 40},
    }  # fmt: skip


async def test_engines(start):
    """State and load of each, and of decode what it publishes of itself; of one that is down nothing old is told."""
    cluster = await start(admin_key="sk-admin")
    cluster.decode[0].index_lines += "vllm:num_requests_waiting 2.0\nbidikv:retained_tokens 64\n"
    await cluster.probe()
    listed = (await cluster.client.get("/bidikv/v1/engines", headers=ADMIN)).json()["data"]
    state = {"healthy": True, "draining": False, "circuit": "closed", "in_flight": 0}
    notes = {"running": 0, "waiting": 2, "kv_usage": None, "retained_tokens": 64, "protected_tokens": None}
    assert listed == [
        {"role": "prefill", "url": cluster.urls["prefill-0"], **state},
        {"role": "decode", "url": cluster.urls["decode-0"], **state, "index": ["10.0.0.0:7000"], **notes},
    ]
    cluster.decode[0].healthy = False
    await cluster.probe()
    listed = (await cluster.client.get("/bidikv/v1/engines", headers=ADMIN)).json()["data"]
    assert not listed[1]["healthy"]
    assert not set(notes) & set(listed[1])


async def test_turns(start):
    """The last ones of all, newest first, failed ones too, each with what to change."""
    cluster = await start(admin_key="sk-admin")
    key = (await cluster.chat("hi")).headers["x-bidikv-session"]
    await cluster.client.post("/v1/completions", content=b"{}", headers={"X-Request-Id": "r-2"})
    turns = (await cluster.client.get("/bidikv/v1/turns", headers=ADMIN)).json()["data"]
    assert [(turn["number"], turn["outcome"]) for turn in turns] == [(2, "invalid_request"), (1, "ok")]
    assert (turns[0]["request_id"], turns[0]["advice"]) == ("r-2", None)
    assert (turns[1]["conversation"], turns[1]["reason"]) == (key, "new_conversation")
    assert "same X-Session-ID" in turns[1]["advice"]
    assert abs(turns[1]["time_s"] - time.time()) < 5
    for params, numbers in (({"limit": 1}, [2]), ({"after": 1}, [2]), ({"after": 2}, [])):
        page = (await cluster.client.get("/bidikv/v1/turns", params=params, headers=ADMIN)).json()
        assert [turn["number"] for turn in page["data"]] == numbers
