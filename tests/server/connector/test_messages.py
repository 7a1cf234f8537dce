"""Side-channel messages survive the wire, and nothing else is believed."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_server.connector import messages

ids = st.lists(st.integers(0, 2**31), max_size=20)
lookups = st.builds(messages.Lookup, st.integers(0, 9), st.text(), st.text(), st.binary(max_size=99))
validates = st.builds(messages.Validate, st.integers(0, 9), st.text(), ids, ids)
verdicts = st.builds(messages.Verdict, st.integers(0, 9), st.booleans())


@given(lookups | validates | verdicts)
def test_round_trip(message):
    """What is encoded is decoded."""
    assert messages.decode(messages.encode(message)) == message


@settings(max_examples=500)
@given(st.binary(max_size=300))
def test_garbage_is_ignored(data):
    """Arbitrary bytes never raise."""
    messages.decode(data)


@given(lookups | validates, st.data())
def test_damaged_messages_never_raise(message, data):
    """Truncated and flipped messages decode to nothing or to a message, without an error."""
    wire = bytearray(messages.encode(message))
    position = data.draw(st.integers(0, len(wire) - 1))
    wire[position] ^= data.draw(st.integers(1, 255))
    messages.decode(bytes(wire))
    messages.decode(bytes(wire[:position]))


def test_oversized_messages_are_refused_unread():
    """A message larger than any of ours is not parsed."""
    assert messages.decode(b"\x00" * (messages.MAX_MESSAGE_BYTES + 1)) is None


def test_digests_split_only_at_whole_digests():
    """A list of digests with a remainder is not a list of digests."""
    assert messages.split_digests(b"a" * 64) == [b"a" * 32, b"a" * 32]
    assert messages.split_digests(b"") == []
    assert messages.split_digests(b"a" * 33) is None


@pytest.mark.parametrize("tail", [b"\x91" * 5000, b"\xdd\x00\x00\xff\xff" * 9])
def test_what_is_nested_too_deeply_is_unreadable(tail):
    """An honest message with anything behind it, also where its reader is the engine's own thread."""
    honest = bytearray(messages.encode(messages.Verdict(messages.VERSION, valid=True)))
    honest[0] += 1  # One more element.
    assert messages.decode(bytes(honest) + tail) is None
    assert messages.version_of(bytes(honest) + tail) in {None, messages.VERSION}


def test_the_version_of_a_message_is_read_without_the_rest():
    """A peer's message of eight megabytes of empty lists does not become eight million lists."""
    data = b"\xdd" + (7_000_000).to_bytes(4, "big") + b"\xa1x\x09" + b"\x90" * 6_999_998
    tracemalloc.start()
    try:
        assert messages.version_of(data) == 9
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
