"""Kills: planned by the seed, carried out one after the other, and an excuse while they last."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fake_engine import eventually
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.launch.errors import StartTimeoutError
from bidikv_server.verify.chaos import Chaos, Kill, plan_kills

pytestmark = pytest.mark.anyio
MEMBERS = ["prefill-0", "decode-0", "router"]


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Members:
    """Remembers what was done to it; a restart takes until it is let go."""

    def __init__(self, error=None):
        self.done = []
        self.may_start = threading.Event()
        self.error = error

    def members(self):
        return MEMBERS

    def kill(self, name):
        self.done.append(("kill", name))

    def restart(self, name):
        assert self.may_start.wait(10)
        if self.error:
            raise self.error
        self.done.append(("restart", name))


@given(seed=st.integers(), turns=st.integers(1, 200))
def test_every_member_goes_before_one_goes_twice(seed, turns):
    """The same for the same seed, within the turns that are played."""
    kills = plan_kills(seed, turns, MEMBERS)
    assert kills == plan_kills(seed, turns, MEMBERS)
    for first in range(0, len(kills) - 2, 3):
        assert {kill.member for kill in kills[first : first + 3]} == set(MEMBERS)
    assert all(kill.turn <= turns and 0 <= kill.delay_s <= 1.5 for kill in kills)
    assert len(kills) == (turns + 2) // 5


async def test_a_member_is_killed_when_its_turn_begins_and_excuses_failures_until_it_is_back():
    """Not before, and not for requests that began after."""
    members = Members()
    chaos = Chaos(members, [Kill(2, "decode-0", 0.0)], lambda _: None)
    work = asyncio.create_task(chaos.work())
    before_s = time.monotonic()
    await chaos.turn_begins()
    assert not chaos.excuses(before_s)
    await chaos.turn_begins()
    await eventually(lambda: members.done == [("kill", "decode-0")])
    assert chaos.excuses(before_s)
    members.may_start.set()
    await work
    assert members.done == [("kill", "decode-0"), ("restart", "decode-0")]
    assert chaos.excuses(before_s)
    assert not chaos.excuses(time.monotonic())
    (outage,) = chaos.outages
    assert (outage.member, outage.before_turn) == ("decode-0", 2)


async def test_what_no_turn_reaches_is_left_out():
    """The end of the turns is the end of the kills."""
    members = Members()
    chaos = Chaos(members, [Kill(2, "router", 0.0)], lambda _: None)
    work = asyncio.create_task(chaos.work())
    await chaos.turn_begins()
    chaos.finish()
    await work
    assert members.done == []


async def test_a_member_that_does_not_come_back_ends_the_run():
    """With the launcher's own message."""
    members = Members(StartTimeoutError("decode-0 not ready"))
    members.may_start.set()
    chaos = Chaos(members, [Kill(1, "decode-0", 0.0)], lambda _: None)
    await chaos.turn_begins()
    with pytest.raises(StartTimeoutError):
        await chaos.work()


async def test_only_a_few_turns_begin_while_a_member_is_down():
    """The rest of the plan is played on a whole cluster."""
    members = Members()
    chaos = Chaos(members, [Kill(1, "prefill-0", 0.0)], lambda _: None)
    work = asyncio.create_task(chaos.work())
    await chaos.turn_begins()
    await eventually(lambda: members.done == [("kill", "prefill-0")])
    begun = []

    async def play(number):
        await chaos.turn_begins()
        begun.append(number)

    playing = [asyncio.create_task(play(number)) for number in range(5)]
    await eventually(lambda: len(begun) == 2)
    assert not playing[2].done()
    members.may_start.set()
    await asyncio.gather(work, *playing)
    assert begun == list(range(5))
