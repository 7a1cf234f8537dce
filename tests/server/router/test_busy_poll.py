"""The loop that goes on looking for packets for a while, and sleeps after it."""

import asyncio
import os

import pytest
import uvloop
from fake_engine import eventually

from bidikv_server.router.busy_poll import BusyPoll
from bidikv_server.router.doorway import Bounds, guarded

BUSY_S = 0.2


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine on each kind of loop."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


def test_it_looks_for_a_while_after_every_packet(run):
    """As long as it was told to after the last one, and then sleeps; the next packet begins it anew."""
    spent = []
    poll = BusyPoll(BUSY_S, spent.append)

    async def play():
        assert not poll.polls
        for _ in range(2):
            poll.touch()
            poll.touch()
            assert poll.polls
            before = len(spent)
            await eventually(lambda: not poll.polls)
            assert len(spent) == before + 1
        # Whatever else the machine did meanwhile, a good part of it was spent with nothing but looking.
        assert 0 < sum(spent) <= 2 * BUSY_S + 0.2

    run(play())


def test_it_holds_nothing_up(run):
    """What is due while it looks is done, and packets are seen: the loop turns, it only does not sleep."""
    poll = BusyPoll(10.0, lambda _: None)

    async def play():
        reader, writer = os.pipe()
        came = asyncio.Event()
        loop = asyncio.get_running_loop()
        poll.touch()
        loop.add_reader(reader, came.set)
        loop.call_later(0.01, os.write, writer, b"x")
        await asyncio.wait_for(came.wait(), 5)
        assert poll.polls
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)

    run(play())


def test_what_it_spends_is_told_while_it_goes_on(run, monkeypatch):
    """Under traffic it may never end."""
    monkeypatch.setattr("bidikv_server.router.busy_poll._TELL_S", 0.01)
    spent = []
    poll = BusyPoll(60.0, spent.append)

    async def play():
        poll.touch()
        await eventually(lambda: len(spent) > 3)
        assert poll.polls

    run(play())


def seconds(page):
    return float(page.split("\nbidikv_router_busy_poll_seconds_total ")[1].split()[0])


async def test_turns_with_it(start):
    """Answers are the same; what it spends is counted, only while packets come."""
    cluster = await start(busy_poll_s=0.05)
    plain = await start()
    for stream in (False, True):
        answer = await cluster.chat("hi", stream=stream)
        assert (answer.status_code, answer.content) == (200, (await plain.chat("hi", stream=stream)).content)

    poll = cluster.app.touch.__self__
    await eventually(lambda: not poll.polls)
    assert seconds((await cluster.client.get("/metrics")).text) > 0
    assert not poll.polls
    assert seconds((await plain.client.get("/metrics")).text) == 0
    assert plain.app.touch is None


def test_clients_packets_count():
    """The door tells of each, whatever becomes of it."""
    touches = []
    bounds = Bounds(max_connections=1, max_head_bytes=1024, request_s=1.0, stalled_s=1.0)
    kind = guarded(bounds, lambda _: None, lambda: touches.append(1))
    door = kind.__new__(kind)
    door._hangs_up = True
    door.data_received(b"x")
    assert touches == [1]
