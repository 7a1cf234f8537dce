"""Stock bidirectional engines: a handle is used at most once, for a proven append, and as far as tokens prove it."""

import asyncio
import json

import pytest
from fake_engine import Failure
from stock_engine import BLOCK_SIZE, StockEngine, render

from bidikv.headers import ReuseHeader
from bidikv_server.wire import NOTHING_TO_PULL

pytestmark = pytest.mark.anyio

SESSION = {"X-Session-ID": "session-1"}
FIRST = "tell me a story"
ANSWER = "Hello there"


def reuse(answer) -> ReuseHeader:
    found = ReuseHeader.parse(answer.headers["x-bidikv-reuse"])
    assert found is not None
    return found


@pytest.fixture
async def cluster(start):
    """One bidirectional pair."""
    return await start(kind=StockEngine, transfer="nixl-bidirectional")


def asked(cluster):
    """`kv_transfer_params` of the last prefill leg."""
    return cluster.prefill[0].prefilled[-1].params


def pulled(cluster):
    """Prompt tokens that the last prefill leg was told to fetch."""
    params = asked(cluster)
    return params["remote_num_tokens"] if params.get("remote_block_ids") else 0


def held_tokens(*contents):
    """What decode holds after a turn: all but the last token."""
    body = {
        "messages": [
            {"role": "assistant" if number % 2 else "user", "content": content}
            for number, content in enumerate(contents)
        ]
    }
    return [*render(body), *map(ord, ANSWER)]


async def test_first_turn(cluster):
    """Nothing to fetch; decode is asked for token ids, and the client gets its answer as if it had not been."""
    answer = await cluster.chat(FIRST, headers=SESSION)
    assert asked(cluster) == NOTHING_TO_PULL
    assert reuse(answer).reason == "new_conversation"
    assert cluster.decode[0].seen[-1].body["return_token_ids"] is True
    plain = {**json.loads(cluster.decode[0].answer), "kv_transfer_params": None, "prompt_token_ids": None}
    plain["choices"][0]["token_ids"] = None
    assert answer.content == json.dumps(plain, separators=(",", ":")).encode()


async def test_append(cluster):
    """The next turn sends decode's handle, cut to the whole blocks that both hold, and the very tokens compared."""
    await cluster.chat(FIRST, headers=SESSION)
    held = held_tokens(FIRST)
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    whole = len(held) // BLOCK_SIZE
    prompt = render(cluster.prefill[0].prefilled[-1].body)
    assert prompt[: len(held)] == held
    assert asked(cluster) == {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(100, 100 + whole))],
        "remote_num_tokens": whole * BLOCK_SIZE,
        "remote_engine_id": "decode-0",
        "remote_request_id": "decode-0-0",
        "remote_host": "10.0.0.9",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_blocks_expiry_time": 480.5,
        "transfer_mode": "pull",
        "prompt_token_ids": prompt,
    }
    assert reuse(answer) == ReuseHeader("hit", len(prompt))


async def test_usage_speaks_against_a_hit(cluster):
    """Prefill that computed what it was told to fetch had declined."""
    await cluster.chat(FIRST, headers=SESSION)
    cluster.prefill[0].cached_tokens = BLOCK_SIZE
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert reuse(answer).reason == "no_account"


async def test_used_once(cluster):
    """A retry of the turn that used a handle has none."""
    await cluster.chat(FIRST, headers=SESSION)
    cluster.decode[0].bidirectional = False
    for reason in ("hit", "not_retained"):
        answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
        assert reuse(answer).reason == reason
    assert asked(cluster) == NOTHING_TO_PULL


async def test_used_once_at_once(cluster):
    """Of branches that start together one has the handle."""
    await cluster.chat(FIRST, headers=SESSION)
    await asyncio.gather(
        *(cluster.chat(FIRST, ANSWER, f"branch {number}", headers=SESSION) for number in range(4))
    )
    first_turns = [seen.params.get("remote_request_id") for seen in cluster.prefill[0].prefilled]
    assert first_turns.count("decode-0-0") == 1


@pytest.mark.parametrize(
    "contents",
    [
        ("tell me a tale", ANSWER, "more"),
        (FIRST, "Hello", "more"),
        (FIRST, ANSWER + "!", "more"),
        (FIRST,),
        (FIRST, ANSWER),
    ],
    ids=["edited question", "shorter answer", "longer answer", "regenerated", "nothing new"],
)
async def test_no_append(cluster, contents):
    """Anything but the same history, the answer as it came and something new after it is computed."""
    await cluster.chat(FIRST, headers=SESSION)
    answer = await cluster.chat(*contents, headers=SESSION)
    assert asked(cluster) == NOTHING_TO_PULL
    assert reuse(answer).reason == "diverged"


async def test_rendered_otherwise(cluster, monkeypatch):
    """Where the template writes a past answer otherwise than it was generated, reuse ends in front of it."""
    await cluster.chat(FIRST, headers=SESSION)
    monkeypatch.setattr("stock_engine.render", lambda body: [*held_tokens(FIRST)[:18], *range(2000, 2040)])
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert pulled(cluster) == 16
    assert reuse(answer).reason == "hit_diverged"


async def test_rendered_all_otherwise(cluster, monkeypatch):
    """A prompt whose first block differs proves nothing."""
    await cluster.chat(FIRST, headers=SESSION)
    monkeypatch.setattr("stock_engine.render", lambda body: list(range(2000, 2100)))
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert (asked(cluster), reuse(answer).reason) == (NOTHING_TO_PULL, "diverged")


async def test_engine_that_renders_nothing(cluster, caplog):
    """Without --enable-scale-out on prefill nothing can be proven; the log says so once."""
    cluster.prefill[0].renders = False
    await cluster.chat(FIRST, headers=SESSION)
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    await cluster.chat(FIRST, ANSWER, "more", ANSWER, "yet more", headers=SESSION)
    assert (asked(cluster), reuse(answer).reason) == (NOTHING_TO_PULL, "unsupported")
    assert caplog.text.count("--enable-scale-out") == 1


async def test_expired(start):
    """A handle is dropped before decode frees its blocks."""
    cluster = await start(kind=StockEngine, transfer="nixl-bidirectional", handle_ttl_s=1e-6)
    await cluster.chat(FIRST, headers=SESSION)
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert (asked(cluster), reuse(answer).reason) == (NOTHING_TO_PULL, "expired")


@pytest.mark.parametrize(
    "headers",
    [{"X-Session-ID": "session-2"}, {**SESSION, "Authorization": "Bearer another"}],
    ids=["another conversation", "another tenant"],
)
async def test_strangers(cluster, headers):
    """The same messages in another conversation or of another tenant have no handle."""
    await cluster.chat(FIRST, headers=SESSION)
    await cluster.chat(FIRST, ANSWER, "more", headers=headers)
    assert asked(cluster) == NOTHING_TO_PULL


async def test_streamed(cluster):
    """A stream carries no handle: nothing is asked of it, and the next turn is computed."""
    await cluster.chat(FIRST, headers=SESSION, stream=True)
    assert "return_token_ids" not in cluster.decode[0].seen[-1].body
    answer = await cluster.chat(FIRST, "Hello", "more", headers=SESSION)
    assert (asked(cluster), reuse(answer).reason) == (NOTHING_TO_PULL, "not_retained")


async def test_streamed_turn_uses_a_handle(cluster):
    """Only keeping needs a whole answer."""
    await cluster.chat(FIRST, headers=SESSION)
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION, stream=True)
    assert reuse(answer).reason == "hit"


async def test_token_ids_for_a_client(cluster):
    """A client that asked for token ids gets them."""
    answer = await cluster.chat(FIRST, headers=SESSION, return_token_ids=True)
    assert answer.json()["choices"][0]["token_ids"][-1] == 0
    assert answer.json()["kv_transfer_params"] is None


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-bidikv-readback": "off"}, {}),
        ({"x-bidikv-turn": 'v=1, k="aux"'}, {}),
        ({"x-bidikv-turn": "v=1, ret=0"}, {}),
        ({"x-bidikv-turn": "v=1, final"}, {}),
    ],
)
async def test_turns_that_leave_nothing(cluster, headers, body):
    """What the client says of a turn counts."""
    await cluster.chat(FIRST, headers={**SESSION, **headers}, **body)
    assert "return_token_ids" not in cluster.decode[0].seen[-1].body
    await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert asked(cluster) == NOTHING_TO_PULL


async def test_media(cluster, monkeypatch):
    """Media stand behind tokens that are alike for all: a turn with any leaves no handle, and uses none."""
    monkeypatch.setattr("stock_engine.render", lambda body: list(range(60)))
    for picture in ("data:,1", "data:,2"):
        content = [
            {"type": "image_url", "image_url": {"url": picture}},
            {"type": "text", "text": "what is this"},
        ]
        messages = [{"role": "user", "content": content}]
        for _ in range(2):
            body = {"model": "m", "messages": messages}
            await cluster.client.post("/v1/chat/completions", json=body, headers=SESSION)
            assert asked(cluster) == NOTHING_TO_PULL
            messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "more"}]
    assert cluster.prefill[0].rendered == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_repeated_prompts(cluster, stream):
    """An answer that repeats its prompt comes out otherwise where token ids are asked for, so they are not."""
    for _ in range(2):
        body = {"model": "m", "prompt": "long ago " * 40, "echo": True, "stream": stream}
        await cluster.client.post("/v1/completions", json=body, headers=SESSION)
        assert "return_token_ids" not in cluster.decode[0].answered[-1].body
        assert asked(cluster) == NOTHING_TO_PULL


@pytest.mark.parametrize("lost", ["remote_host", "remote_blocks_expiry_time", "remote_request_id"])
async def test_incomplete_handles(cluster, monkeypatch, lost):
    """A handle without an address, or without the expiry that prefill checks, is none."""
    whole = StockEngine._handle

    def without(engine, seen, computed):
        return {name: value for name, value in whole(engine, seen, computed).items() if name != lost}

    monkeypatch.setattr(StockEngine, "_handle", without)
    await cluster.chat(FIRST, headers=SESSION)
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert (asked(cluster), reuse(answer).reason) == (NOTHING_TO_PULL, "not_retained")


async def test_several_groups(cluster):
    """Sliding windows and states hold no earlier positions: their handles are none."""
    cluster.decode[0].groups = 2
    await cluster.chat(FIRST, headers=SESSION)
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert reuse(answer).reason == "not_retained"


async def test_prefill_fails_with_a_handle(cluster):
    """It may have failed at fetching: the same engine computes, once more and without."""
    await cluster.chat(FIRST, headers=SESSION)
    cluster.prefill[0].with_handle_status = 500
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert (answer.status_code, reuse(answer).reason) == (200, "transfer_failed")
    assert asked(cluster) == NOTHING_TO_PULL
    cluster.prefill[0].with_handle_status = 200
    # That turn left a handle of its own.
    answer = await cluster.chat(FIRST, ANSWER, "more", ANSWER, "yet more", headers=SESSION)
    assert reuse(answer).reason == "hit"


async def test_decode_engine_goes_down(cluster):
    """What it held is gone, though it comes back at the same address."""
    await cluster.chat(FIRST, headers=SESSION)
    for healthy in (False, True):
        cluster.decode[0].healthy = healthy
        await cluster.probe()
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert (asked(cluster), reuse(answer).reason) == (NOTHING_TO_PULL, "not_retained")


async def test_failed_turn_leaves_no_handle(cluster):
    """Only an answer that ended well is read."""
    cluster.decode[0].failures.extend([Failure(status=500), Failure(status=500)])
    await cluster.chat(FIRST, headers=SESSION)
    answer = await cluster.chat(FIRST, ANSWER, "more", headers=SESSION)
    assert asked(cluster) == NOTHING_TO_PULL
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["text", "ids"])
async def test_completions(cluster, kind):
    """A completion appends if its tokens begin with all that decode holds."""
    prompt = "long ago " * 40

    def sent(text):
        return text if kind == "text" else [ord(character) for character in text]

    async def complete(text):
        body = {"model": "m", "prompt": sent(text)}
        return await cluster.client.post("/v1/completions", json=body, headers=SESSION)

    await complete(prompt)
    answer = await complete(prompt + ANSWER + " and then")
    assert reuse(answer).reason == "hit"
    assert pulled(cluster) == (len(prompt) + len(ANSWER)) // BLOCK_SIZE * BLOCK_SIZE
    assert "prompt_token_ids" not in asked(cluster)
    answer = await complete(prompt + ANSWER + " and then something else")
    assert reuse(answer).reason == "diverged"
