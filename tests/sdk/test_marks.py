"""What is kept of messages: hashes of what they say, in bounded memory."""

from bidikv import marks
from bidikv.headers import ReuseHeader
from bidikv.marks import mark_of
from bidikv.reuse import TurnReport


def call(arguments):
    """An answer with one tool call."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_arguments_are_told_apart_by_what_they_mean():
    """Whichever of their spellings came first, and after any number of others."""
    first = mark_of(call('{"a": 1, "b": [2]}'))
    assert mark_of(call('{"b":[2],"a":1}')) == first
    assert mark_of(call('{"b":[2.0],"a":1}')) != first
    for number in range(marks._MOST_MEANINGS + 10):
        mark_of(call(f'{{"n": {number}}}'))
        assert len(marks._MEANINGS) <= marks._MOST_MEANINGS
    assert mark_of(call('{"a": 1, "b": [2]}')) == first


def test_an_account_is_read_when_it_is_asked_for():
    """One that cannot be read is none."""
    account = ReuseHeader("hit", 100, 64, 16, 20)
    report = TurnReport(told=account.format())
    assert report.reuse == account
    assert report.reuse is report.reuse
    assert (report.reason, report.remote_tokens) == ("hit", 64)
    assert TurnReport(told="not an account").reason is None
    assert TurnReport().reuse is None
