"""What is kept of messages: hashes of what they say, in bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from bidikv import marks
from bidikv.headers import ReuseHeader
from bidikv.marks import Mark, Marks, mark_of
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


ways_on = st.tuples(st.integers(0, 99), st.integers(0, 99), st.lists(st.text(max_size=3), max_size=3))


@given(st.lists(ways_on, max_size=20))
def test_no_history_changes_another(ways):
    """Whichever histories go on from which of their messages, each has the marks that it had when it was made."""
    histories, told = [Marks([], 0)], [[]]
    for which, place, roles in ways:
        old = which % len(told)
        shared = place % (len(told[old]) + 1)
        new = [Mark({}, role) for role in roles]
        histories.append(histories[old].then(shared, iter(new)))
        told.append([*told[old][:shared], *new])
    for history, expected in zip(histories, told, strict=True):
        assert history.part(0) == expected
        assert len(history) == len(expected)
        assert [history[index] for index in range(len(expected))] == expected
        assert not expected or history[-1] is expected[-1]


def test_going_on_from_the_end_copies_nothing():
    """As nearly every turn does: it takes what is new, not what was."""
    first = Marks([], 0).then(0, [Mark({}, "user")])
    second = first.then(1, [Mark({}, "assistant")])
    assert second._known is first._known
    assert first.then(1, [Mark({}, "user")])._known is not first._known
