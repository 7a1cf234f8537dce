"""Telling real retention indexes, over the real side channel, that a conversation has ended."""

import asyncio
import sys
import threading

import pytest
from fake_engine import eventually

from bidikv_server.connector import messages
from bidikv_server.router.core.ids import ConversationKey
from bidikv_server.router.releases import Outcome, Releaser

pytestmark = pytest.mark.anyio

KEY = ConversationKey("0" * 32)


@pytest.fixture
async def releaser(anyio_backend):
    telling = Releaser("shared", timeout_s=0.5)
    yield telling
    await telling.close()


async def test_indexes_forget(releaser, serve_index, holding):
    """The index that holds the conversation lets it go, and one that does not says so."""
    index = holding(KEY)
    first, second = serve_index(index.answer), serve_index(holding().answer)
    told = await releaser.release([first, second, first], KEY)
    assert told == {first: Outcome.RELEASED, second: Outcome.NOT_HELD}
    assert await releaser.release([first], KEY) == {first: Outcome.NOT_HELD}
    assert index.take_changes() == {KEY: None}


async def test_an_index_that_does_not_answer(releaser, serve_index, holding, caplog):
    """A foreign secret, and an address where nobody is, cost the timeout and a line of the log, which is said once."""
    index = holding(KEY)
    address = serve_index(index.answer, "other")
    told = await releaser.release([address, "127.0.0.1:9", "not an address"], KEY)
    assert set(told.values()) == {Outcome.NO_ANSWER}
    assert index.take_changes() == {}
    assert len(caplog.messages) == 3
    assert address in caplog.messages[0]
    assert "another BIDIKV_SECRET" in caplog.messages[0]
    await releaser.renew([address], KEY, 5)
    assert len(caplog.messages) == 3


@pytest.mark.parametrize(
    "reply",
    [
        messages.encode(messages.Refused(messages.VERSION, "no")),
        messages.encode(messages.Verdict(messages.VERSION + 1, valid=True)),
        b"junk",
    ],
)
async def test_an_index_that_refuses(releaser, serve_index, reply):
    """Another version, or no sense at all, is not taken for a release."""
    address = serve_index(lambda _: reply)
    assert await releaser.release([address], KEY) == {address: Outcome.REFUSED}


async def test_who_asked_leaves(releaser, serve_index, holding):
    """An administrator who disconnects meanwhile takes nothing back, and the side channel lives on."""
    index = holding(KEY)
    held, answer = threading.Event(), threading.Event()

    def slow(data):
        held.set()
        assert answer.wait(5)
        return index.answer(data)

    address = serve_index(slow)
    asking = asyncio.ensure_future(releaser.release([address], KEY))
    await eventually(held.is_set)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    answer.set()
    await eventually(lambda: index.take_changes() == {KEY: None})
    assert await releaser.release([address], KEY) == {address: Outcome.NOT_HELD}


async def test_nothing_to_tell(releaser):
    """Without addresses nothing is opened."""
    assert await releaser.release([], KEY) == {}
    assert releaser._client is None


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
async def test_without_the_packages(releaser, monkeypatch, package):
    """A router without pyzmq or msgspec says that it could not tell."""
    for name in [name for name in sys.modules if name.startswith("bidikv_server.connector")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("bidikv_server.connector", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert await releaser.release(["h:1"], KEY) == {"h:1": Outcome.NOT_TOLD}
