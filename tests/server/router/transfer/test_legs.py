"""What each transfer system's legs carry, through the router and to the byte."""

import asyncio
import json
import re

import pytest
from fake_engine import Failure, eventually
from stock_engine import StockEngine

from bidikv.headers import ReuseHeader
from bidikv_server.wire import NOTHING_TO_PULL

pytestmark = pytest.mark.anyio

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ALONE = {**BODY, "stream": False, "n": 1, "max_tokens": 1, "max_completion_tokens": 1}
PREFILL = {**ALONE, "return_token_ids": True}
TOKENS = [1001, *map(ord, "hi"), 1002]
SALT = re.compile(r"[0-9a-f]{32}")


def reuse(answer) -> ReuseHeader:
    found = ReuseHeader.parse(answer.headers["x-bidikv-reuse"])
    assert found is not None
    return found


def legs(cluster):
    """The bodies of the last turn's two legs."""
    return cluster.prefill[0].seen[-1].body, cluster.decode[0].seen[-1].body


def params(cluster):
    """Their `kv_transfer_params`, without the prompt's tokens."""
    pair = [dict(body["kv_transfer_params"]) for body in legs(cluster)]
    pair[1].pop("prompt_token_ids", None)
    return pair


def handle(number=0):
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-0",
        "remote_block_ids": [[1, 2, 3]],
        "remote_request_id": f"prefill-0-{number}",
    }


async def test_bidikv_is_the_default(start):
    """Without a setting both legs carry our own part."""
    cluster = await start()
    await cluster.chat("hi")
    prefill, decode = (leg["bidikv"] for leg in params(cluster))
    assert (prefill["sources"], decode["retain_s"], prefill["salt"]) == ([], 480.0, decode["salt"])


async def test_pull(start):
    """Stock NIXL: prefill keeps the prompt, decode gets the handle as it came, and nothing of ours is in either leg."""
    cluster = await start(kind=StockEngine, transfer="nixl")
    cluster.prefill[0].cached_tokens = 1
    answer = await cluster.chat("hi")
    assert legs(cluster) == (
        {**PREFILL, "kv_transfer_params": NOTHING_TO_PULL},
        {**BODY, "kv_transfer_params": {**handle(), "prompt_token_ids": TOKENS}},
    )
    assert reuse(answer) == ReuseHeader("no_account", 4, 0, 1, 3)
    # Decode's own handle, should it return one, is nobody's business.
    assert answer.json()["kv_transfer_params"] is None


async def test_push(start):
    """Stock NIXL push: decode learns where prefill is and none of its blocks, and one id that no client chose pairs the legs."""
    cluster = await start(kind=StockEngine, transfer="nixl-push")
    named = {"X-Request-Id": "the-clients-own"}
    answers = [await cluster.chat("hi", headers=named) for _ in range(2)]
    coordinates = {name: value for name, value in handle(1).items() if name != "remote_block_ids"}
    assert legs(cluster) == (
        {**PREFILL, "kv_transfer_params": NOTHING_TO_PULL},
        {**BODY, "kv_transfer_params": {**coordinates, "prompt_token_ids": TOKENS}},
    )
    pairs = list(zip(cluster.prefill[0].seen, cluster.decode[0].seen, strict=True))
    ids = [prefill.headers["x-request-id"] for prefill, _ in pairs]
    assert ids == [decode.headers["x-request-id"] for _, decode in pairs]
    assert len({*ids, "the-clients-own"}) == 3
    # What vLLM appends to make its own ids is eight hex digits; ours must not look like that.
    assert not any(re.search(r"-[0-9a-f]{8}$", name) for name in ids)
    assert [answer.headers["x-request-id"] for answer in answers] == ["the-clients-own"] * 2


def mooncake(urls):
    return {urls[0]: urls[0], urls[1]: urls[1]}


async def test_mooncake(start):
    """Both legs carry one transfer id, and decode the engine id that the bootstrap server gave."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    await cluster.chat("hi")
    await cluster.chat("hi", stream=True)
    prefill, decode = (engine.seen[0].body for engine in (cluster.prefill[0], cluster.decode[0]))
    transfer_id = prefill["kv_transfer_params"]["transfer_id"]
    assert prefill == {
        **ALONE,
        "min_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        },
    }
    assert decode == {
        **BODY,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "mooncake-0",
            "remote_bootstrap_addr": cluster.urls["prefill-0"],
            "transfer_id": transfer_id,
        },
    }
    assert cluster.decode[0].seen[1].params["transfer_id"] != transfer_id


async def test_mooncake_ranks_take_turns(start):
    """With data parallelism the prefill leg goes to the rank whose id decode was given."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    cluster.prefill[0].ranks = {str(rank): {"engine_id": f"rank-{rank}"} for rank in range(2)}
    await cluster.probe()
    for _ in range(3):
        await cluster.chat("hi")
    ranks = [seen.headers["x-data-parallel-rank"] for seen in cluster.prefill[0].seen]
    assert sorted(set(ranks)) == ["0", "1"]
    assert [f"rank-{rank}" for rank in ranks] == [
        seen.params["remote_engine_id"] for seen in cluster.decode[0].seen
    ]


async def test_mooncake_restarted_prefill(start):
    """A probe learns the id of an engine that came back as another one."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    cluster.prefill[0].ranks = {"0": {"engine_id": "another"}}
    await cluster.probe()
    await cluster.chat("hi")
    assert cluster.decode[0].seen[-1].params["remote_engine_id"] == "another"


@pytest.mark.parametrize("ranks", [{}, {"0": {}}, [], {"x": {"engine_id": "a"}}])
async def test_mooncake_without_bootstrap(start, ranks):
    """While nobody says who prefill is, decode answers alone."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    cluster.prefill[0].ranks = ranks
    await cluster.probe()
    answer = await cluster.chat("hi")
    assert (answer.status_code, reuse(answer).reason) == (200, "no_prefill")
    assert "kv_transfer_params" not in cluster.decode[0].seen[-1].body
    assert cluster.prefill[0].seen == []


async def test_mooncake_legs_run_at_once(start):
    """Decode is asked before prefill has answered, and the client hears nothing before both agree."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    cluster.prefill[0].failures.append(Failure(hang=True))
    turn = asyncio.ensure_future(cluster.chat("hi"))
    await eventually(lambda: cluster.prefill[0].seen and cluster.decode[0].seen)
    assert not turn.done()
    turn.cancel()
    await eventually(lambda: cluster.prefill[0].aborted == 1)


@pytest.mark.parametrize("failure", [Failure(status=500), Failure(cut_after=0), "stop"])
@pytest.mark.parametrize("stream", [False, True])
async def test_mooncake_prefill_fails(start, failure, stream):
    """Decode, which would wait in vain, is left, and asked again alone."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    if failure == "stop":
        cluster.prefill[0].finish_reason = "stop"
    else:
        cluster.prefill[0].failures.append(failure)
    answer = await cluster.chat("hi", stream=stream)
    assert (answer.status_code, reuse(answer).reason) == (200, "no_prefill")
    assert "kv_transfer_params" not in cluster.decode[0].seen[-1].body


async def test_mooncake_decode_fails(start):
    """The prefill leg is left too, and decode answers alone."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    cluster.decode[0].failures.append(Failure(status=500))
    answer = await cluster.chat("hi")
    assert (answer.status_code, reuse(answer).reason) == (200, "transfer_failed")


async def test_mooncake_refused(start):
    """What an engine says of a bad request is the client's, once."""
    cluster = await start(kind=StockEngine, transfer="mooncake", mooncake_bootstrap=mooncake)
    for engine in (*cluster.prefill, *cluster.decode):
        engine.failures.append(Failure(status=400, body=b'{"error":{"message":"bad"}}'))
    answer = await cluster.chat("hi")
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "bad"}})


async def test_lmcache(start):
    """Both legs carry the tenant's tag and nothing else; equal prompts of two tenants have different ones."""
    cluster = await start(kind=StockEngine, transfer="lmcache")
    tags = []
    for key in ("a", "b", "a"):
        await cluster.chat("hi", headers={"Authorization": f"Bearer {key}"})
        prefill, decode = params(cluster)
        assert prefill == decode
        assert list(prefill) == ["lmcache.tag.bidikv"]
        tags.append(prefill["lmcache.tag.bidikv"])
    assert all(SALT.fullmatch(tag) for tag in tags)
    assert tags[0] == tags[2] != tags[1]


async def test_lmcache_without_prefill(start):
    """Decode alone still looks into its tenant's part of the store only."""
    cluster = await start(kind=StockEngine, transfer="lmcache")
    cluster.prefill[0].healthy = False
    await cluster.probe()
    answer = await cluster.chat("hi")
    assert reuse(answer).reason == "no_prefill"
    assert list(cluster.decode[0].seen[-1].params) == ["lmcache.tag.bidikv"]


@pytest.mark.parametrize("name", ["nixl+lmcache", "lmcache+nixl"])
async def test_combined(start, name):
    """A MultiConnector passes parameters to all its children, so the legs carry both systems' parts."""
    cluster = await start(kind=StockEngine, transfer=name)
    cluster.prefill[0].cached_tokens = 1
    answer = await cluster.chat("hi")
    prefill, decode = params(cluster)
    tag = prefill.pop("lmcache.tag.bidikv")
    assert decode.pop("lmcache.tag.bidikv") == tag
    assert (prefill, decode) == (NOTHING_TO_PULL, handle())
    # Whose the cached token was, prefill's or the store's, nobody says.
    assert reuse(answer) == ReuseHeader("no_account", 4, None, None, 3)


async def test_combined_with_ours(start):
    """Our account counts, and decode gets what to retain."""
    cluster = await start(transfer="bidikv+lmcache")
    answer = await cluster.chat("hi")
    prefill, decode = params(cluster)
    assert (prefill["bidikv"]["sources"], decode["bidikv"]["retain_s"]) == ([], 480.0)
    assert prefill["lmcache.tag.bidikv"] == prefill["bidikv"]["salt"]
    assert reuse(answer).prompt_tokens == 100


async def test_combined_mooncake(start):
    """The mover decides the order of the legs."""
    cluster = await start(kind=StockEngine, transfer="mooncake+lmcache", mooncake_bootstrap=mooncake)
    await cluster.chat("hi")
    prefill, decode = params(cluster)
    assert prefill["transfer_id"] == decode["transfer_id"]
    assert prefill["lmcache.tag.bidikv"] == decode["lmcache.tag.bidikv"]


@pytest.mark.parametrize("transfer", ["nixl", "nixl-push", "nixl-bidirectional"])
async def test_no_handle_no_params(start, transfer):
    """Decode gets no parameters without a handle: a bidirectional engine holds the blocks of any request that has some."""
    cluster = await start(kind=StockEngine, transfer=transfer)
    cluster.prefill[0].with_handle = False
    assert (await cluster.chat("hi")).status_code == 200
    assert "kv_transfer_params" not in cluster.decode[0].seen[-1].body


@pytest.mark.parametrize("transfer", ["nixl", "nixl-push", "nixl-bidirectional", "lmcache", "nixl+lmcache"])
async def test_clients_parameters_never_pass(start, transfer):
    """They name hosts and blocks to read."""
    cluster = await start(kind=StockEngine, transfer=transfer)
    evil = {"remote_host": "evil", "lmcache.tag.bidikv": "evil"}
    await cluster.chat("hi", kv_transfer_params=evil, vllm_xargs={"kv_transfer_params": evil})
    assert "evil" not in json.dumps(legs(cluster))
