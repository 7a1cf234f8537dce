"""The wire contract: what is written can be read, and nothing that is read can raise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv.headers import ReuseHeader, TurnHeader, format_dictionary, parse_dictionary

tokens = st.none() | st.integers(0, 10**15 - 1)
ids = st.none() | st.from_regex(r"\A[A-Za-z0-9_-]{8,64}\Z")
printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))
seconds = st.none() | st.integers(0, 10**12).map(lambda milliseconds: milliseconds / 1000)


@given(
    index=tokens,
    kind=st.sampled_from(["main", "tool", "aux", "compaction"]),
    parent=ids,
    agent=st.none() | st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=64),
    retain_s=seconds,
    wait_s=seconds,
    final=st.booleans(),
)
def test_turn_round_trip(**members):
    """Every turn header reads back as it was written."""
    turn = TurnHeader(**members)
    assert TurnHeader.parse(turn.format()) == turn


@given(reason=printable, counts=st.tuples(tokens, tokens, tokens, tokens, tokens))
def test_reuse_round_trip(reason, counts):
    """Every reuse header reads back as it was written."""
    reuse = ReuseHeader(reason, *counts)
    assert ReuseHeader.parse(reuse.format()) == reuse


@given(st.text() | printable.map("v=1, reason=".__add__) | printable.map("v=1, i=".__add__))
def test_garbage_is_ignored(value):
    """No text makes a parser raise."""
    parse_dictionary(value)
    TurnHeader.parse(value)
    ReuseHeader.parse(value)


@given(st.text())
def test_written_headers_are_ascii(agent):
    """Whatever a label holds, the header can be sent."""
    header = TurnHeader(agent=agent).format()
    assert header.isascii()
    assert header.isprintable()


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "v=2, i=3",
        "v=1; i=3",
        "i=3",
        "v=1, i=-3",
        'v=1, p="short"',
        "v=1, ret=x",
        "v=1, w=-1",
        "v=1, w",
    ],
)
def test_turn_defaults(value):
    """A header that is missing, of another version or ill-typed says nothing."""
    assert TurnHeader.parse(value) == TurnHeader()


def test_unknown_members_are_skipped():
    """Either side may add members."""
    assert TurnHeader.parse("v=1, i=3, zz=?0, w=1.5, t=tok/en").index == 3


def test_reuse_needs_a_reason():
    """Counts without a reason are no account."""
    assert ReuseHeader.parse("v=1, prompt=10") is None


def test_member_spellings():
    """Each kind of member has the spelling of RFC 9651."""
    members = {"a": True, "b": False, "c": 3, "d": 1.5, "e": 'q"\\', "f": None}
    assert format_dictionary(members) == 'a, b=?0, c=3, d=1.500, e="q\\"\\\\"'
