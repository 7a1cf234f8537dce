"""A head waits for the bytes behind it, for one round of the loop at most, and nothing is lost or out of order."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.joined_writes import JoinedWrites

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire(asyncio.Transport):
    """Remembers every write."""

    def __init__(self):
        super().__init__()
        self.writes = []
        self.closed = self.aborted = False

    def write(self, data):
        assert not self.closed
        self.writes.append(data)

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name, default=None):
        return {"peername": "client"}.get(name, default)


async def round_of_loop():
    await asyncio.sleep(0)


def play(steps):
    """Every step is bytes to write or None for a round of the loop; what went out."""

    async def main():
        wire = Wire()
        joined = JoinedWrites(wire, asyncio.get_running_loop())
        for step in steps:
            if step is None:
                await round_of_loop()
            else:
                joined.write(step)
        joined.close()
        await round_of_loop()
        assert wire.closed
        return wire.writes

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("steps", "writes"),
    [
        ([HEAD, b"ok"], [HEAD + b"ok"]),
        ([HEAD, None, b"ok"], [HEAD, b"ok"]),
        ([HEAD, b"a", b"b"], [HEAD + b"a", b"b"]),
        ([HEAD], [HEAD]),
        ([HEAD, b"ok", HEAD, b"ok"], [HEAD + b"ok", HEAD + b"ok"]),
        (
            [b"HTTP/1.1 100 Continue\r\n\r\n", None, HEAD, b"ok"],
            [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"ok"],
        ),
    ],
)
def test_a_head_goes_with_the_first_bytes(steps, writes):
    """Only if they come in the same round."""
    assert play(steps) == writes


@given(
    st.lists(st.none() | st.sampled_from([HEAD, b"", b"x", b"HTTP/1.1 in a body"]) | st.binary(max_size=8))
)
def test_nothing_is_lost(steps):
    """And the order stays."""
    assert b"".join(play(steps)) == b"".join(step for step in steps if step is not None)


async def _abort():
    wire = Wire()
    joined = JoinedWrites(wire, asyncio.get_running_loop())
    joined.write(HEAD)
    joined.abort()
    await round_of_loop()
    return wire


def test_an_aborted_connection_gets_nothing_more():
    """What was held back is dropped with it."""
    wire = asyncio.run(_abort())
    assert wire.aborted
    assert wire.writes == []


def test_the_rest_is_the_transports_own():
    """Its state and what it knows."""

    async def main():
        wire = Wire()
        joined = JoinedWrites(wire, asyncio.get_running_loop())
        assert not joined.is_closing()
        assert joined.get_extra_info("peername") == "client"
        wire.close()
        assert joined.is_closing()

    asyncio.run(main())
