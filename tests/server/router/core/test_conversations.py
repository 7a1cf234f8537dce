"""The conversation table against a model of it, and the shapes that agents' histories take."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bidikv_server.router.core.conversations import ConversationTable, Holder
from bidikv_server.router.core.digests import Chain, chain
from bidikv_server.router.core.engines import IndexInfo
from bidikv_server.router.core.ids import EngineUrl, Scope, session_key

SCOPE = Scope(tenant="t", model="m")
A, B = Holder(EngineUrl("http://a")), Holder(EngineUrl("http://b"), (IndexInfo("i", "b:1"),))


def prompt(*contents: str, scope: Scope = SCOPE) -> Chain:
    return chain({"messages": [{"role": "user", "content": content} for content in contents]}, scope)


def table(**bounds) -> ConversationTable:
    return ConversationTable(**{"max_conversations": 100, "max_turns": 100, "idle_s": 1000.0, **bounds})


def run(known: ConversationTable, session, *contents, holder=A, now_s=0.0, scope=SCOPE):
    match = known.find(scope, session, prompt(*contents, scope=scope), now_s)
    known.commit(match, holder, now_s)
    known.check_integrity()
    return match


def test_extension():
    """The next turn hangs under the last one."""
    known = table()
    run(known, "s", "a")
    match = run(known, "s", "a", "b", "c", holder=B)
    assert match.ancestor.holder == A
    assert match.own == match.latest == match.ancestor
    first, second = known.turns(match.key)
    assert (second.parent, second.depth, second.holder) == (first.digest, 3, B)


def test_retry():
    """The same prompt again meets itself and stays one turn, now at the later engine."""
    known = table()
    run(known, "s", "a")
    run(known, "s", "a", "b")
    match = run(known, "s", "a", "b", holder=B)
    assert match.ancestor.depth == 2
    first, second = known.turns(match.key)
    assert (second.parent, second.holder) == (first.digest, B)


def test_rewind_and_fork_within_a_session():
    """A prompt that branches off meets the turn where it does."""
    known = table()
    run(known, "s", "a")
    run(known, "s", "a", "b", "c", holder=B)
    match = run(known, "s", "a", "x", "y")
    assert match.own.depth == 1
    assert match.latest.depth == 3
    assert [turn.parent for turn in known.turns(match.key)] == [None, match.own.digest, match.own.digest]


def test_fork_into_another_session():
    """A new session that extends another one's history reads from there and becomes its own conversation."""
    known = table()
    origin = run(known, "parent", "a", holder=B)
    fork = run(known, "child", "a", "b")
    assert fork.key != origin.key
    assert (fork.ancestor.holder, fork.own, fork.latest) == (B, None, None)
    again = run(known, "child", "a", "b", "c")
    assert again.ancestor == again.own
    assert again.own.holder == A


def test_edit():
    """A rewritten history meets nothing, but its conversation is still known."""
    known = table()
    run(known, "s", "a", "b", holder=B)
    match = run(known, "s", "compacted")
    assert match.ancestor is None
    assert match.source.holder == B


def test_failed_turn():
    """A turn that is not committed changes nothing."""
    known = table()
    run(known, "s", "a")
    before = repr(known)
    known.find(SCOPE, "s", prompt("a", "b"), 1.0)
    assert repr(known) == before


@pytest.mark.parametrize(
    "other", [Scope("u", "m"), Scope("t", "n"), Scope("t", "m", cache_salt="x"), Scope("t", "m", adapter="x")]
)
def test_scopes_are_apart(other):
    """Neither the session id nor the text of another scope is found."""
    known = table()
    first = run(known, "s", "a")
    match = known.find(other, "s", prompt("a", scope=other), 0.0)
    assert match.source is None
    assert match.key != first.key


def test_prompt_without_prefixes():
    """A prompt too short to have a name keeps its session's place and is nobody's ancestor."""
    known = table()
    short = chain({"prompt": "hi"}, SCOPE)
    match = known.find(SCOPE, "s", short, 0.0)
    known.commit(match, B, 0.0)
    known.check_integrity()
    assert known.find(SCOPE, "s", short, 0.0).home.holder == B
    assert known.find(SCOPE, None, short, 0.0).source is None
    assert known.turns(match.key) == ()


def test_idle_conversations_expire():
    """Idle means no committed turn for the whole time."""
    known = table(idle_s=10.0)
    run(known, "s", "a", now_s=0.0)
    run(known, "s", "a", "b", now_s=9.0)
    assert known.find(SCOPE, "s", prompt("a"), 18.9).source is not None
    assert known.find(SCOPE, "s", prompt("a"), 19.0).source is None
    assert len(known) == 0


def test_oldest_turn_goes_first():
    """Children of a forgotten turn hang under its parent."""
    known = table(max_turns=2)
    for contents in ("a", "ab", "abc", "abcd"):
        match = run(known, "s", *contents)
    third, fourth = known.turns(match.key)
    assert (third.parent, fourth.parent) == (None, third.digest)


def test_forgotten():
    """A forgotten conversation is nobody's ancestor; others keep the turns that they share with it."""
    known = table()
    origin = run(known, "parent", "a")
    fork = run(known, "child", "a")
    assert known.forget(origin.key)
    known.check_integrity()
    assert not known.forget(origin.key)
    assert known.turns(origin.key) == ()
    assert known.find(SCOPE, "parent", prompt("a", "b"), 0.0).ancestor == known.turns(fork.key)[0]


class Model:
    """The same promises, kept without any index: conversations in order of use, each with its turns in order."""

    def __init__(self):
        self.conversations = OrderedDict()

    def expire(self, now_s):
        for key, (used_s, _) in list(self.conversations.items()):
            if now_s - used_s >= 50.0:
                del self.conversations[key]

    def commit(self, key, digest, now_s):
        _, turns = self.conversations.pop(key, (0.0, []))
        turns = [*(turn for turn in turns if turn != digest), digest][-4:]
        self.conversations[key] = (now_s, turns)
        while len(self.conversations) > 3:
            self.conversations.popitem(last=False)

    def depth(self, digests, keys):
        known = {turn for key in keys for turn in self.conversations.get(key, (0.0, []))[1]}
        return max((depth for depth, digest in enumerate(digests, 1) if digest in known), default=0)


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class TableAgainstModel(RuleBasedStateMachine):
    """Any mix of turns, retries, forks, failures and idle time, with small bounds."""

    contents = st.lists(st.sampled_from("ab"), min_size=1, max_size=4)
    sessions = st.sampled_from(["s", "t", "u", "v", None])

    def __init__(self):
        super().__init__()
        self.known = table(max_conversations=3, max_turns=4, idle_s=50.0)
        self.model = Model()
        self.now_s = 0.0
        self.pending = []

    @rule(session=sessions, contents=contents)
    def begin(self, session, contents):
        self.model.expire(self.now_s)
        digests = prompt(*contents).prefixes
        match = self.known.find(SCOPE, session, prompt(*contents), self.now_s)
        expected = self.model.depth(digests, self.model.conversations), self.model.depth(digests, [match.key])
        found = match.ancestor, match.own
        assert tuple(turn.depth if turn else 0 for turn in found) == expected
        assert all(turn is None or digests[turn.depth - 1] == turn.digest for turn in found)
        assert (match.latest is not None) == (match.key in self.model.conversations)
        self.pending.append(match)

    @rule(data=st.data(), holder=st.sampled_from([A, B]), ok=st.booleans())
    def end(self, data, holder, ok):
        if not self.pending:
            return
        match = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        if ok:
            self.model.expire(self.now_s)
            self.known.commit(match, holder, self.now_s)
            self.model.commit(match.key, match.digest, self.now_s)
            assert self.known.turns(match.key)[-1].holder == holder

    @rule(session=sessions)
    def forget(self, session):
        if session is not None:
            key = session_key(SCOPE, session)
            held = key in self.known
            assert self.known.forget(key) == held
            self.model.conversations.pop(key, None)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.now_s += seconds

    @invariant()
    def is_whole(self):
        self.known.check_integrity()
        assert len(self.known) <= len(self.model.conversations)
        assert all(key in self.model.conversations for key in self.known)


TestTableAgainstModel = TableAgainstModel.TestCase
