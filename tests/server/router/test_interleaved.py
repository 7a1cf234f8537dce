"""Many turns of two tenants at once, clients that leave and engines that fail: nobody gets a byte of another's answer."""

import asyncio
import json
import random

import httpx2
import pytest
from fake_engine import Failure, FakeEngine, echo_of, eventually

from bidikv_server.router.core.engines import Role

pytestmark = pytest.mark.anyio

TURNS = 600
AT_ONCE = 40
FAULTS = (Failure(500), Failure(503), Failure(cut_after=0), Failure(cut_after=1), Failure(end_after=1))


class HaltingEngine(FakeEngine):
    """Echoes, and yields to the others at odd moments."""

    async def __call__(self, scope, receive, send) -> None:
        self.echo, luck = True, random.Random(len(self.seen))

        async def halting(message):
            for _ in range(luck.randrange(12)):
                await asyncio.sleep(0)
            await send(message)

        await super().__call__(scope, receive, halting)


def body_of(luck, number):
    """A turn of one of some conversations; no two are alike."""
    depth, conversation = luck.choice([1, 3, 5]), luck.randrange(20)
    contents = [*(f"{conversation}-{place}" for place in range(depth - 1)), f"turn {number}"]
    messages = [
        {"role": "assistant" if place % 2 else "user", "content": content}
        for place, content in enumerate(contents)
    ]
    body = {"model": "m", "messages": messages, "stream": luck.random() < 0.5}
    return body if luck.random() < 0.5 else {**body, "session_id": f"s-{conversation}"}


def text_of(answer):
    """What it says, and whether it is whole."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["message"]["content"], True
    lines = [line[6:] for line in answer.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events if "choices" in event]
    return "".join(deltas), not any("error" in event for event in events)


@pytest.mark.parametrize("seed", [1, 2])
async def test_everybody_gets_their_own(start, seed):
    """Whole answers are the request's own, broken ones begin like it, request ids are equal across tenants; nothing is left."""
    luck = random.Random(seed)
    cluster = await start(
        prefill=2, decode=2, kind=HaltingEngine, api_keys={"sk-a": "a", "sk-b": "b"}, circuit_failures=1000,
        max_in_flight=24, max_queue=TURNS,
    )  # fmt: skip
    some, ended = asyncio.Semaphore(AT_ONCE), 0

    async def turn(number):
        nonlocal ended
        body = body_of(luck, number)
        headers = {"Authorization": f"Bearer sk-{luck.choice('ab')}", "X-Request-Id": f"same-{number % 5}"}
        async with some:
            if luck.random() < 0.1:
                luck.choice((*cluster.prefill, *cluster.decode)).failures.append(luck.choice(FAULTS))
            asking = asyncio.ensure_future(
                cluster.client.post("/v1/chat/completions", json=body, headers=headers)
            )
            if luck.random() < 0.5:
                # At every point of a turn some client leaves.
                for _ in range(luck.randrange(150)):
                    await asyncio.sleep(0)
                asking.cancel()
            await asyncio.wait((asking,))
        if asking.cancelled():
            return
        answer = asking.result()
        assert answer.headers["x-request-id"] == headers["X-Request-Id"]
        if answer.status_code != httpx2.codes.OK:
            assert "error" in answer.json()
            return
        ended += 1
        said, is_whole = text_of(answer)
        assert said == echo_of(body) if is_whole else echo_of(body).startswith(said)

    await asyncio.gather(*map(turn, range(TURNS)))
    assert TURNS / 4 < ended < TURNS
    await eventually(lambda: cluster.app._queue.running == cluster.app._queue.waiting == 0)
    snapshots = [engine for role in Role for engine in cluster.app.engines.snapshots(role)]
    assert [(engine.in_flight, engine.load) for engine in snapshots] == [(0, 0)] * 4
    cluster.app.table.check_integrity()
    cluster.app.history.check_integrity()
