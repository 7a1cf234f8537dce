"""A prompt is tokenised once, and no answer shows it."""

import pytest
from fake_engine import Failure

pytestmark = pytest.mark.anyio

IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


async def outcomes(cluster):
    """Decode legs by where their tokens came from."""
    page = (await cluster.client.get("/metrics")).text
    prefix = 'bidikv_router_prompt_tokenisations_total{outcome="'
    lines = [line.removeprefix(prefix) for line in page.splitlines() if line.startswith(prefix)]
    return {line.partition('"')[0]: float(line.split()[-1]) for line in lines}


async def test_chat(start):
    """Prefill says the ids, decode gets them, and the client's own wish to see them is its own affair."""
    cluster = await start()
    await cluster.chat("hi", return_token_ids=True)
    await cluster.chat("hi")
    assert [leg.body["return_token_ids"] for leg in cluster.prefill[0].prefilled] == [True, True]
    asked, unasked = cluster.decode[0].answered
    assert asked.params["prompt_token_ids"] == unasked.params["prompt_token_ids"] == [11, 22, 33]
    assert asked.body["return_token_ids"] is True
    assert "return_token_ids" not in unasked.body
    assert await outcomes(cluster) == {"once": 2.0}


async def test_completion(start):
    """A completion takes the ids as its prompt."""
    cluster = await start()
    await cluster.client.post("/v1/completions", json={"model": "m", "prompt": "text", "seed": 1})
    (leg,) = cluster.decode[0].answered
    assert leg.body["prompt"] == [11, 22, 33]
    assert leg.body["seed"] == 1
    assert "prompt_token_ids" not in leg.params


@pytest.mark.parametrize(
    ("fields", "settings", "outcome"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, {}, "media"),
        ({"echo": True}, {}, "needs_text"),
        ({}, {"tokenise_once": False}, "off"),
    ],
)
async def test_decode_tokenises_itself(start, fields, settings, outcome):
    """Then no ids travel, and the reason is counted."""
    cluster = await start(**settings)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    await cluster.client.post("/v1/chat/completions", json=body)
    assert "return_token_ids" not in cluster.prefill[0].prefilled[0].body
    assert "prompt_token_ids" not in cluster.decode[0].answered[0].params
    assert await outcomes(cluster) == {outcome: 1.0}


async def test_ids_that_decode_refuses(start):
    """The turn is computed once more, decode renders itself, and the client sees no error."""
    cluster = await start()
    refusal = (
        b'{"error":{"message":"out of vocabulary","param":"kv_transfer_params.prompt_token_ids","code":400}}'
    )
    cluster.decode[0].failures.append(Failure(400, refusal))
    answer = await cluster.chat("hi")
    assert answer.content == cluster.decode[0].answer
    assert len(cluster.prefill[0].prefilled) == 2
    assert "prompt_token_ids" not in cluster.decode[0].answered[1].params
    assert await outcomes(cluster) == {"once": 1.0, "rejected": 1.0}


async def test_a_second_refusal_is_the_clients(start):
    """An error that stays without the ids is about the request."""
    cluster = await start()
    refusal = Failure(400, b'{"error":{"message":"prompt_token_ids is my favourite word"}}')
    cluster.decode[0].failures.extend([refusal, refusal])
    answer = await cluster.chat("hi")
    assert (answer.status_code, answer.content) == (400, refusal.body)
    assert len(cluster.decode[0].seen) == 2


async def test_no_handle_no_ids(start):
    """Decode that gets nothing to pull renders its prompt as ever: transfer parameters are never sent for the ids alone."""
    cluster = await start()
    cluster.prefill[0].with_handle = False
    await cluster.chat("hi")
    assert cluster.decode[0].answered[0].params is None
    assert await outcomes(cluster) == {}
