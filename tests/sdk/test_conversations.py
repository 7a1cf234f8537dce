"""Conversations: ids and currency."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bidikv
from bidikv.headers import SESSION_PATTERN
from bidikv.hints import Hint, ToolTimes

atoms = st.text() | st.binary() | st.integers() | st.uuids()
keys = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@given(keys)
def test_id_passes_gateways_and_hides_its_key(key):
    """Any key gives an id of the same grammar and length."""
    session = bidikv.session_id(key)
    assert SESSION_PATTERN.fullmatch(session)
    assert len(session) == 28


@given(keys, keys)
def test_ids_differ_as_keys_do(first, second):
    """Two keys share an id only if they are equal and of the same types."""
    assert (bidikv.session_id(first) == bidikv.session_id(second)) == (repr(first) == repr(second))


def test_id_is_stable():
    """The id is a promise to other processes and later versions."""
    assert bidikv.conversation("ticket-17").id == "c_hqbvlfwgjdx4q6iibjrborahne"


def test_secret_changes_ids():
    """Deployments with different secrets cannot guess each other's ids."""
    assert bidikv.session_id("a", secret=b"s") != bidikv.session_id("a")


def test_no_key_is_a_new_conversation():
    """Without a key, each conversation is its own."""
    assert bidikv.conversation().id != bidikv.conversation().id


@pytest.mark.parametrize(
    ("key", "secret"), [(1.5, None), (object(), None), (("a", None), None), ("a", b"x" * 65)]
)
def test_bad_keys(key, secret):
    """A key without one stable spelling is refused when it is given, not when it is sent."""
    with pytest.raises(bidikv.ConfigurationError):
        bidikv.session_id(key, secret=secret)


@pytest.mark.parametrize("retain_s", [-1, float("nan"), float("inf")])
def test_bad_retention(retain_s):
    """A retention that is no duration is refused."""
    with pytest.raises(bidikv.ConfigurationError, match="retain_s"):
        bidikv.conversation(retain_s=retain_s)


def test_child():
    """A child is stable, names its parent, and differs by agent and key."""
    parent = bidikv.conversation("p")
    child = parent.child("planner")
    assert (child.parent, child.agent, child.kind) == (parent.id, "planner", "main")
    assert child.id == bidikv.conversation("p").child("planner").id
    assert len({parent.id, child.id, parent.child("writer").id, parent.child("planner", key=2).id}) == 4


def test_fork():
    """A fork names where it came from; without a key it is new each time."""
    conversation = bidikv.conversation("p", agent="planner", retain_s=3)
    fork = conversation.fork("left")
    assert (fork.parent, fork.agent, fork.retain_s) == (conversation.id, "planner", 3)
    assert fork.id == bidikv.conversation("p").fork("left").id
    assert len({conversation.id, fork.id, conversation.fork("right").id, conversation.fork().id}) == 4
    assert (
        len(
            {
                conversation.fork().id,
                conversation.fork().id,
                conversation.child("fork", key="left").id,
                fork.id,
            }
        )
        == 4
    )


@pytest.mark.parametrize("hint", [{"wait_s": -1}, {"retain_s": float("nan")}, {"kind": "other"}])
def test_bad_hints(hint):
    """A hint that cannot mean anything is refused where it is given."""
    with pytest.raises(bidikv.ConfigurationError, match=next(iter(hint))):
        bidikv.conversation().hint(**hint)
    with pytest.raises(bidikv.ConfigurationError, match="expected_s"):
        bidikv.conversation().tool("a", expected_s=-1)


def test_hints_nest():
    """An inner hint wins where it says something, for its own conversation only."""
    conversation, other = bidikv.conversation("a", retain_s=9), bidikv.conversation("b")
    with conversation.hint(agent="x", wait_s=1), other.hint(agent="y"), conversation.hint(retain_s=0):
        assert conversation.hints() == Hint("main", "x", 0, 1)
        assert other.hints().agent == "y"
    assert conversation.hints() == Hint("main", None, 9)


def test_tool_times():
    """What tools took is what they are expected to take, twice over; one that still runs counts as long as it may."""
    times = ToolTimes()
    assert times.wait_s() == 30
    number, expected_s = times.start("a", None)
    assert expected_s == 30
    times.finish(number, "a", 4.0)
    times.finish(number, "a", 400.0)
    assert times.wait_s() == 8
    assert times.start("a", None)[1] == 8
    slow, _ = times.start("b", 100.0)
    assert 99 < times.wait_s() <= 100
    times.finish(slow, "b", 1.0)
    assert times.wait_s() == 8


def test_nesting():
    """The innermost entered conversation is current."""
    outer, inner = bidikv.conversation("o"), bidikv.conversation("i")
    with outer:
        with inner, outer, inner:
            assert bidikv.current_conversation() is inner
        assert bidikv.current_conversation() is outer
    assert bidikv.current_conversation() is None


def test_exit_in_another_context():
    """Leaving where it was never entered is harmless, as happens with generators and fixtures."""
    conversation = bidikv.conversation()
    contextvars.copy_context().run(conversation.__enter__)
    conversation.__exit__(None, None, None)
    assert bidikv.current_conversation() is None


def test_tasks_share_one_object():
    """One conversation entered by overlapping tasks stays current in each, and ends in each."""
    shared = bidikv.conversation("s")

    async def use(own):
        async with shared:
            await asyncio.sleep(0)
            async with own:
                await asyncio.sleep(0)
                assert await asyncio.to_thread(bidikv.current_conversation) is own
            assert bidikv.current_conversation() is shared
        assert bidikv.current_conversation() is None

    async def both():
        await asyncio.gather(use(bidikv.conversation("a")), use(bidikv.conversation("b")))

    asyncio.run(both())


def test_bare_threads_start_with_none():
    """A thread does not inherit a conversation by accident."""
    seen = []
    with bidikv.conversation():
        thread = threading.Thread(target=lambda: seen.append(bidikv.current_conversation()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_repr_hides_the_key():
    """Logs show the wire id only."""
    assert "secret" not in repr(bidikv.conversation("secret", agent="a"))
    assert bidikv.conversation(uuid.UUID(int=1)).next_index() == 0
