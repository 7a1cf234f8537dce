"""Placement and failure through a router and fake engines: escapes, refusals, circuits, budgets and modes."""

import asyncio
import time

import pytest
from fake_engine import CHAT_EVENTS, Failure, eventually

from bidikv.headers import ReuseHeader
from bidikv_server.router import retries
from bidikv_server.router.core.circuit import CircuitState
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.ids import EngineUrl

pytestmark = pytest.mark.anyio

SESSION = {"X-Session-ID": "session-1"}
ADMIN = {"authorization": "Bearer sk-admin"}
FIRST, SECOND = ("hi",), ("hi", "Hello", "more")


def reason(answer) -> str:
    return ReuseHeader.parse(answer.headers["x-bidikv-reuse"]).reason


async def last(cluster, answer):
    """What `explain` says of a conversation's last turn."""
    key = answer.headers["x-bidikv-session"]
    told = await cluster.client.get(f"/bidikv/v1/conversations/{key}", headers=ADMIN)
    return told.json()["recent"][0]


async def metrics(cluster) -> str:
    return (await cluster.client.get("/metrics")).text


def state(cluster, role, number=0):
    return cluster.app.engines.snapshots(role)[number].circuit


def busy(cluster, name, legs):
    """Make a decode engine look as if it had so many more legs."""
    for _ in range(legs):
        cluster.app.engines.leg_started(EngineUrl(cluster.urls[name]), Role.DECODE)


async def test_a_turn_leaves_a_busy_engine_and_stays_away(start):
    """It is read back from where it was, lives elsewhere from then on, and does not go back when loads are alike again."""
    cluster = await start(decode=2, admin_key="sk-admin")
    await cluster.chat(*FIRST, headers=SESSION)
    busy(cluster, "decode-0", 17)
    moved = await cluster.chat(*SECOND, headers=SESSION)
    assert cluster.prefill[0].prefilled[-1].ours["sources"] == ["10.0.0.0:7000"]
    assert len(cluster.decode[1].answered) == 1
    told = await last(cluster, moved)
    assert (told["placement"], told["decode"]) == ("pressure", cluster.urls["decode-1"])
    busy(cluster, "decode-1", 17)
    await cluster.chat(*SECOND, "Hello", "again", headers=SESSION)
    assert cluster.prefill[0].prefilled[-1].ours["sources"] == ["10.0.0.1:7000"]
    assert len(cluster.decode[1].answered) == 2
    text = await metrics(cluster)
    for counted in ('reason="pressure"', 'reason="home"', 'reason="least_loaded"'):
        assert f"bidikv_router_placements_total{{{counted}}} 1.0" in text


async def test_a_pinned_conversation_stays(start):
    """Another policy, another place."""
    cluster = await start(decode=2, decode_policy="pinned")
    await cluster.chat(*FIRST, headers=SESSION)
    busy(cluster, "decode-0", 1000)
    await cluster.chat(*SECOND, headers=SESSION)
    assert len(cluster.decode[0].answered) == 2


async def test_a_burst_spreads_over_decode_engines(start):
    """Turns whose prompts are still being computed count where they will be decoded."""
    cluster = await start(decode=2)
    cluster.prefill[0].gate = asyncio.Event()
    turns = [asyncio.ensure_future(cluster.chat(str(number))) for number in range(6)]
    await eventually(lambda: len(cluster.prefill[0].prefilled) == 6)
    cluster.prefill[0].gate.set()
    await asyncio.gather(*turns)
    assert [len(engine.answered) for engine in cluster.decode] == [3, 3]


async def test_prompts_go_where_their_beginning_was_computed(start):
    """Also when that engine is not the first of equals; a burst of strangers spreads."""
    cluster = await start(prefill=2, admin_key="sk-admin")
    cluster.prefill[0].gate = asyncio.Event()
    first = asyncio.ensure_future(cluster.chat("x" * 500))
    await eventually(lambda: cluster.prefill[0].prefilled)
    await cluster.chat("y" * 500, headers=SESSION)
    cluster.prefill[0].gate.set()
    await first
    answer = await cluster.chat("y" * 500, "Hello", "more", headers=SESSION)
    assert [len(engine.prefilled) for engine in cluster.prefill] == [1, 2]
    told = await last(cluster, answer)
    assert (told["prefill"], told["prefill_choice"]) == (cluster.urls["prefill-1"], "cached_prefix")
    assert 'prefill_choices_total{reason="cached_prefix"} 1.0' in await metrics(cluster)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_refuses_is_passed_over(start, role, status):
    """An engine that takes no more for now costs its turn nothing but another engine, and no circuit."""
    cluster = await start(prefill=2, decode=2, circuit_failures=1, admin_key="sk-admin")
    await cluster.chat(*FIRST, headers=SESSION)
    getattr(cluster, role)[0].failures.append(Failure(status, headers=((b"retry-after", b"60"),)))
    answer = await cluster.chat(*SECOND, headers=SESSION)
    assert (answer.status_code, reason(answer)) == (200, "hit")
    assert len(getattr(cluster, role)[1].seen) == 1
    told = await last(cluster, answer)
    assert told["placement"] == ("refused" if role == "decode" else "home")
    assert state(cluster, Role(role)) is CircuitState.CLOSED


async def test_everybody_refuses_for_a_moment(start):
    """The turn waits as long as the least patient engine asks for, and then starts over."""
    cluster = await start(decode=2, refused_wait_s=5.0)
    for engine in cluster.decode:
        engine.failures.append(Failure(429, headers=((b"retry-after", b"0"),)))
    answer = await cluster.chat("hi", stream=True)
    assert answer.content == b"".join(CHAT_EVENTS)
    assert sum(len(engine.answered) for engine in cluster.decode) == 3


async def test_everybody_refuses_for_long(start):
    """A client that would wait too long is told at once, in the engine's words and with its `Retry-After`."""
    cluster = await start(decode=2, refused_wait_s=5.0)
    for engine in cluster.decode:
        engine.failures.append(Failure(429, b"own words", headers=((b"retry-after", b"60"),)))
    began_s = time.monotonic()
    answer = await cluster.chat("hi", stream=True)
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (429, b"own words", "60")
    assert time.monotonic() - began_s < 5.0
    assert [len(engine.answered) for engine in cluster.decode] == [1, 1]
    assert len(cluster.app.table) == 0


@pytest.mark.parametrize(
    ("settings", "legs"),
    [({"max_attempts": 3}, 3), ({"refused_wait_s": 0}, 1), ({"retry_budget_s": 1e-9}, 1)],
)
async def test_budgets_end(start, settings, legs, monkeypatch):
    """A turn that is refused without end is tried so often, or waits so long in all, and no more."""
    monkeypatch.setattr(retries, "_BACKOFF", lambda _state: 0.001)
    cluster = await start(**settings)
    cluster.decode[0].failures.extend([Failure(429)] * 20)
    assert (await cluster.chat("hi")).status_code == 429
    assert len(cluster.decode[0].answered) == legs


async def test_attempts_are_bounded_over_many_engines(start):
    """However many engines there are, a turn that breaks each of them breaks no more than its budget."""
    cluster = await start(decode=5, max_attempts=2)
    for engine in cluster.decode:
        engine.failures.append(Failure(500))
    assert (await cluster.chat("hi")).status_code == 500
    assert [len(engine.answered) for engine in cluster.decode] == [1, 1, 0, 0, 0]


async def test_a_circuit_opens_tries_and_closes(start):
    """After so many failures an engine gets no leg, then one, and once that ends well all of them again."""
    cluster = await start(decode=2, circuit_failures=2, circuit_open_s=60.0)
    cluster.decode[0].failures.extend([Failure(cut_after=0)] * 2)
    await cluster.chat(*FIRST)
    await cluster.chat("other")
    assert state(cluster, Role.DECODE) is CircuitState.OPEN
    legs = len(cluster.decode[0].answered)
    for number in range(3):
        assert (await cluster.chat(f"more {number}")).status_code == 200
    assert len(cluster.decode[0].answered) == legs
    health = (await cluster.client.get("/health")).json()
    assert [engine["circuit"] for engine in health["decode"]] == ["open", "closed"]
    decode = cluster.urls["decode-0"]
    text = await metrics(cluster)
    assert f'engine_circuit{{engine="{decode}",role="decode"}} 2.0' in text
    assert f'circuits_opened_total{{engine="{decode}",role="decode"}} 1.0' in text
    cluster.app.engines.advance(time.monotonic() + 61)
    assert state(cluster, Role.DECODE) is CircuitState.HALF_OPEN
    await cluster.chat("try")
    assert len(cluster.decode[0].answered) == legs + 1
    assert state(cluster, Role.DECODE) is CircuitState.CLOSED


async def test_a_hanging_prefill_engine_is_waited_for_only_so_often(start):
    """With its circuit open decode answers alone at once."""
    cluster = await start(prefill_timeout_s=0.1, circuit_failures=2, circuit_open_s=60.0)
    cluster.prefill[0].failures.extend([Failure(hang=True)] * 9)
    for number in range(4):
        answer = await cluster.chat(f"hi {number}")
        assert (answer.status_code, reason(answer)) == (200, "no_prefill")
    assert len(cluster.prefill[0].prefilled) == 2


async def test_a_poisonous_request_opens_no_circuit(start):
    """A request that every engine answers with 500 is at fault itself: engines stay open to everybody else's."""
    cluster = await start(prefill=2, decode=2, circuit_failures=1)
    for engine in cluster.decode:
        engine.failures.extend([Failure(500)] * 9)
    for _ in range(3):
        assert (await cluster.chat("poison")).status_code == 500
    assert [state(cluster, Role.DECODE, number) for number in (0, 1)] == [CircuitState.CLOSED] * 2
    cluster.decode[1].failures.clear()
    assert (await cluster.chat("poison")).status_code == 200
    assert state(cluster, Role.DECODE) is CircuitState.OPEN


async def test_a_stream_that_breaks_counts_against_its_engine(start):
    """The turn cannot be saved, the next one can be."""
    cluster = await start(decode=2, circuit_failures=1)
    cluster.decode[0].failures.append(Failure(cut_after=2))
    await cluster.chat("hi", stream=True)
    assert state(cluster, Role.DECODE) is CircuitState.OPEN
    assert 'leg_seconds_count{leg="decode",outcome="broke"} 1.0' in await metrics(cluster)


async def test_the_cheapest_mode_runs_on_decode_alone(start):
    """Once it is known what legs take, a turn with little that is new is left to decode, which retains it as any other."""
    cluster = await start(mode_policy="cheapest", admin_key="sk-admin")
    told = {**cluster.prefill[0].account, "prompt_tokens": 1000}
    # A prompt that is new is computed, quickly; of the later ones most is pulled, for much longer than this machine may stall.
    cluster.prefill[0].pull_s = 0.1
    cluster.prefill[0].account = {**told, "remote_tokens": 0, "computed_tokens": 1000}
    contents = ["x" * 3000]
    for number in range(12):
        answer = await cluster.chat(*contents, stream=True, headers=SESSION)
        cluster.prefill[0].account = {**told, "remote_tokens": 900}
        contents += ["Hello", f"more {number}"]
        if reason(answer) == "decode_cheaper":
            break
    assert reason(answer) == "decode_cheaper"
    alone = cluster.decode[0].answered[-1]
    assert set(alone.params) == {"bidikv"}
    assert alone.ours["retain_s"] == 480.0
    assert len(cluster.app.table.turns(answer.headers["x-bidikv-session"])) == len(cluster.decode[0].answered)
    told = await last(cluster, answer)
    assert (told["mode"], told["mode_reason"], told["prefill"]) == ("alone", "cheaper", None)
    assert 'modes_total{mode="alone",reason="cheaper"} 1.0' in await metrics(cluster)


ALONE = {"mode_policy": "fixed_modes:alone"}
"""Whatever it takes: a policy of the placement benchmark."""


async def until_alone(cluster, headers=SESSION, **fields):
    """Play a conversation until decode has had a turn to itself; the next turn's texts, and it."""
    contents = ["x" * 3000]
    for number in range(2):
        answer = await cluster.chat(*contents, stream=True, headers=headers, **fields)
        contents += ["Hello", f"more {number}"]
    assert reason(answer) == "decode_cheaper"
    return contents, answer


async def test_a_turn_alone_is_one_of_its_conversation(start):
    """Decode gets what it would get after prefill: the tenant's salt, the conversation, hints, tools and the client's words."""
    cluster = await start(**ALONE, api_keys={"sk-a": "team-a"})
    key = {"authorization": "Bearer sk-a", **SESSION}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    hint = {"x-bidikv-turn": 'v=1, k="tool", w=30'}
    contents, _ = await until_alone(cluster, {**key, **hint}, tools=tools)
    *_, before, alone = cluster.decode[0].answered
    assert alone.ours == before.ours
    assert alone.ours["protect"]
    for name in ("cache_salt", "tools", "stream", "model"):
        assert alone.body[name] == before.body[name]
    assert "authorization" not in alone.headers
    assert alone.headers["x-session-id"] == before.headers["x-session-id"]
    last_turn = await cluster.chat(
        *contents, stream=True, headers={**key, "x-bidikv-turn": "v=1, final"}, tools=tools
    )
    ended = cluster.decode[0].answered[-1]
    assert last_turn.status_code == 200
    assert (ended.ours["release"], ended.ours["retain_s"]) == (True, 0.0)


async def test_what_decode_did_alone_is_counted(start):
    """Its answer tells the prompt and what was cached: in `explain`, in the metrics, and in a whole answer's header."""
    cluster = await start(**ALONE, admin_key="sk-admin")
    usage = b'{"prompt_tokens":1040,"prompt_tokens_details":{"cached_tokens":1024}}'
    events = list(CHAT_EVENTS)
    events.insert(-1, b'data: {"id":"c1","choices":[],"usage":' + usage + b"}\n\n")
    cluster.decode[0].events = tuple(events)
    cluster.decode[0].answer = cluster.decode[0].answer.replace(b'{"prompt_tokens":9}', usage)
    contents, answer = await until_alone(cluster)
    counts = {"prompt_tokens": 1040, "remote_tokens": 0, "local_tokens": 1024, "computed_tokens": 16}
    told = await last(cluster, answer)
    assert {name: told[name] for name in counts} == counts
    local = 'bidikv_router_prompt_tokens_total{source="local"}'
    before = sample(await metrics(cluster), local)
    whole = await cluster.chat(*contents, headers=SESSION)
    assert ReuseHeader.parse(whole.headers["x-bidikv-reuse"]) == ReuseHeader(
        "decode_cheaper", *counts.values()
    )
    assert sample(await metrics(cluster), local) == before + 1024


def sample(page, name):
    return float(page.split(f"\n{name} ")[1].split()[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_fails_at_a_turn_alone(start, stream):
    """The only decode engine gets it once more, by way of prefill; another one at once, read back from where it was."""
    cluster = await start(**ALONE, circuit_failures=1)
    contents, _ = await until_alone(cluster)
    legs = len(cluster.prefill[0].prefilled)
    cluster.decode[0].failures.append(Failure(500))
    answer = await cluster.chat(*contents, stream=stream, headers=SESSION)
    assert (answer.status_code, reason(answer)) == (200, "hit")
    assert len(cluster.prefill[0].prefilled) == legs + 1
    cluster.decode[0].failures.extend([Failure(500)] * 3)
    contents += ["Hello", "again"]
    answer = await cluster.chat(*contents, stream=stream, headers=SESSION)
    assert answer.status_code == 500
    assert not cluster.decode[0].failures
    answer = await cluster.chat(*contents, stream=stream, headers=SESSION)
    assert answer.status_code == 200


async def test_another_decode_engine_takes_over_a_turn_alone(start):
    """By way of prefill: nothing is read back from an engine that has failed the turn."""
    cluster = await start(**ALONE, decode=2)
    contents, _ = await until_alone(cluster)
    cluster.decode[0].failures.append(Failure(500))
    answer = await cluster.chat(*contents, headers=SESSION)
    assert (answer.status_code, reason(answer)) == (200, "decode_changed")
    assert cluster.prefill[0].prefilled[-1].ours["sources"] == []
    assert len(cluster.decode[1].answered) == 1


async def test_a_stream_alone_that_breaks_off(start):
    """The client gets an error event, and the next turn finds the conversation as it was before."""
    cluster = await start(**ALONE)
    contents, answer = await until_alone(cluster)
    key = answer.headers["x-bidikv-session"]
    turns = len(cluster.app.table.turns(key))
    cluster.decode[0].failures.append(Failure(cut_after=2))
    answer = await cluster.chat(*contents, stream=True, headers=SESSION)
    assert b'"error"' in answer.content
    assert len(cluster.app.table.turns(key)) == turns
    assert (await cluster.chat(*contents, stream=True, headers=SESSION)).content == b"".join(CHAT_EVENTS)


async def test_a_decode_engine_without_a_prefix_cache_does_nothing_alone(start):
    """It says so among its metrics."""
    cluster = await start(mode_policy="cheapest")
    cluster.decode[0].index_lines += 'vllm:cache_config_info{enable_prefix_caching="False"} 1.0\n'
    await cluster.probe()
    cluster.prefill[0].account = {**cluster.prefill[0].account, "remote_tokens": 900, "prompt_tokens": 1000}
    contents = ["x" * 3000]
    for number in range(8):
        await cluster.chat(*contents, stream=True, headers=SESSION)
        contents += ["Hello", f"more {number}"]
    assert len(cluster.prefill[0].prefilled) == 8


async def test_another_tenant_has_nothing_to_run_alone_on(start):
    """The same words of somebody else are a new conversation, which prefill computes."""
    cluster = await start(**ALONE, api_keys={"sk-a": "team-a", "sk-b": "team-b"})
    contents, _ = await until_alone(cluster, {"authorization": "Bearer sk-a", **SESSION})
    answer = await cluster.chat(*contents, headers={"authorization": "Bearer sk-b", **SESSION})
    assert cluster.prefill[0].prefilled[-1].ours["sources"] == []
    assert reason(answer) == "new_conversation"
    assert (
        cluster.decode[0].answered[-1].body["cache_salt"] != cluster.decode[0].answered[-2].body["cache_salt"]
    )


async def test_full_decode_engines_are_left(start):
    """One whose blocks are all but taken loses its turns to one with room, before requests wait there."""
    cluster = await start(decode=2, admin_key="sk-admin")
    await cluster.chat(*FIRST, headers=SESSION)
    cluster.decode[0].index_lines += "vllm:kv_cache_usage_perc 0.97\n"
    cluster.decode[1].index_lines += "vllm:kv_cache_usage_perc 0.1\n"
    await cluster.probe()
    moved = await cluster.chat(*SECOND, headers=SESSION)
    told = await last(cluster, moved)
    assert (told["placement"], told["decode"]) == ("pressure", cluster.urls["decode-1"])
    assert cluster.prefill[0].prefilled[-1].ours["sources"] == ["10.0.0.0:7000"]


async def test_readback_is_the_mode_without_a_word(start):
    """Whatever was measured, nothing runs on decode alone unless settings say so."""
    cluster = await start()
    contents = ["x" * 3000]
    for number in range(8):
        await cluster.chat(*contents, stream=True, headers=SESSION)
        contents += ["Hello", f"more {number}"]
    assert len(cluster.prefill[0].prefilled) == 8
