"""Hiding transfer parameters in answers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.answers import LAST_RESPONSE_EVENT, LastEventHolder, conceal, conceal_transfer

KEY = b'"kv_transfer_params"'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"a": 1}',
        b'{"a": 1, ' + KEY + b": null}",
        b'{"a": "' + KEY.replace(b'"', b'\\"') + b': {1}"}',
        b"{" + KEY + b": {broken",
        b"{" + KEY + b":",
        b"\xff" + KEY + b': {"a": "\xff"',
    ],
)
def test_untouched(raw):
    """Nothing to hide, or nothing that can be read: the same object."""
    assert conceal_transfer(raw) is raw


@pytest.mark.parametrize("value", [b'{"a": {"b": [1, "}"]}}', b"[1]", b'"x"', b"{}"])
def test_concealed(value):
    """Only the value changes, wherever it stands."""
    before, after = b'{"\xc3\xa9": "x",  ' + KEY + b" :\n ", b' , "z": 1.50}'
    assert conceal_transfer(before + value + after) == before + b"null" + after
    twice = before + value + after
    assert conceal_transfer(b"[" + twice + b"," + twice + b"]").count(b"null") == 2


def test_left_out():
    """An API whose answers have no null field does not get one."""
    raw = b'{"id":"msg_1",' + KEY + b':{"a":1},"z":"\xc3\xa9"}'
    assert conceal_transfer(raw, drop=True) == b'{"id":"msg_1","z":"\xc3\xa9"}'
    assert conceal_transfer(b"{" + KEY + b':{"a":1}}', drop=True) == b"{" + KEY + b":null}"
    assert conceal_transfer(b'{"a":1,' + KEY + b":null}", drop=True) == b'{"a":1,' + KEY + b":null}"


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    "own",
    [
        b'{"content":[{"type":"tool_use","name":"f","input":{' + KEY + b':{"a":"}\\"{["}}}]',
        b'{"response":{"output":[{"content":{' + KEY + b":[1]}}]}",
    ],
)
def test_what_the_model_says_stays(own, drop):
    """A tool's argument of that name is part of the answer; the engine's own field is hidden all the same."""
    assert conceal_transfer(own + b"}", drop=drop) == own + b"}"
    hidden = conceal_transfer(own + b"," + KEY + b':{"host":"10.0.0.1"},"z":1}', drop=drop)
    assert hidden == own + (b"" if drop else b"," + KEY + b":null") + b',"z":1}'


EVENTS = b'event: response.created\ndata: {"t":"event: response.completed"}\n\nevent: response.output_text.delta\ndata: 1\n\n'
LAST = b'event: response.completed\ndata: {"r":{' + KEY + b':{"remote_host":"10.0.0.1"},"t":"x"}}\n\n'


@given(st.lists(st.integers(0, len(EVENTS + LAST)), max_size=6))
def test_last_event_is_held(cuts):
    """However the stream is cut: all else passes, and the last event comes whole and without what it must not show."""
    stream, bounds = EVENTS + LAST, [0, *sorted(cuts), len(EVENTS + LAST)]
    holder, passed = LastEventHolder(LAST_RESPONSE_EVENT), b""
    for start, end in itertools.pairwise(bounds):
        passed += holder.feed(stream[start:end])
        assert EVENTS.startswith(passed)
        # What is not the last event is held back by less than its first line.
        assert len(passed) >= min(end, len(EVENTS)) - len(LAST_RESPONSE_EVENT)
    assert passed + holder.end() == EVENTS + LAST.replace(b'{"remote_host":"10.0.0.1"}', b"null")


def test_a_stream_without_a_last_event():
    """Whatever was held back comes in the end."""
    holder = LastEventHolder(LAST_RESPONSE_EVENT)
    assert holder.feed(b"data: 1\n\nevent: resp") + holder.end() == b"data: 1\n\nevent: resp"


def test_other_members():
    """Members of other names are hidden alike; text that looks like one stays, and so does what is null."""
    raw = (
        b'{"token_ids":[1,[2]],"text":"\\"token_ids\\":[1]","prompt_token_ids" : [3],"x":{"token_ids":null}}'
    )
    shown = (
        b'{"token_ids":null,"text":"\\"token_ids\\":[1]","prompt_token_ids" : null,"x":{"token_ids":null}}'
    )
    assert conceal(raw, ("prompt_token_ids", "token_ids")) == shown
    assert conceal(shown, ("prompt_token_ids", "token_ids")) is shown
