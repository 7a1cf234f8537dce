"""The protected set: its budget, its order of giving up, and the references it asks for."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bidikv_server.connector.core.protection import CROSSOVER_TOKENS, Holding, ProtectedSet


def holding(name, blocks, *, since_s=0.0, ttl_s=60.0, tokens=1000):
    return Holding(name, tuple(blocks), since_s, since_s + ttl_s, tokens)


def test_the_earlier_turn_is_superseded():
    """A conversation's next turn keeps the shared blocks and lets the others go."""
    kept = ProtectedSet(10)
    assert kept.admit(holding("c", [1, 2, 3]), now_s=0.0).pin == {1, 2, 3}
    change = kept.admit(holding("c", [1, 2, 7]), now_s=1.0)
    assert (change.pin, change.unpin) == ({7}, {3})


def test_shared_blocks_are_held_once_and_until_the_last_holder_goes():
    """Forks share their parent's blocks."""
    kept = ProtectedSet(10)
    kept.admit(holding("parent", [1, 2]), now_s=0.0)
    assert kept.admit(holding("fork", [1, 5]), now_s=0.0).pin == {5}
    assert kept.release("parent").unpin == {2}
    assert kept.release("fork").unpin == {1, 5}


def test_the_budget_is_never_exceeded():
    """One conversation larger than the budget is protected from its start."""
    kept = ProtectedSet(3)
    assert kept.admit(holding("c", [1, 2, 3, 4, 5]), now_s=0.0).pin == {1, 2, 3}
    assert len(kept) == 3


def test_the_least_likely_to_return_goes_first():
    """Of two equal conversations the one that has been away for longer is given up."""
    kept = ProtectedSet(10)
    kept.admit(holding("away", [1, 2], since_s=0.0), now_s=0.0)
    kept.admit(holding("fresh", [3, 4], since_s=50.0), now_s=50.0)
    assert kept.give_up(2, now_s=51.0).unpin == {1, 2}


def test_the_cheapest_to_recompute_goes_first():
    """Of two that are as likely to return, a block of the longer context saves more compute."""
    kept = ProtectedSet(10)
    kept.admit(holding("short", [1, 2], tokens=100), now_s=0.0)
    kept.admit(holding("long", [3, 4], tokens=20 * CROSSOVER_TOKENS), now_s=0.0)
    assert kept.give_up(1, now_s=1.0).unpin == {2}, "and its tail first"
    assert kept.give_up(1, now_s=1.0).unpin == {1}
    assert kept.give_up(9, now_s=1.0).unpin == {3, 4}


def test_expired_promises_go_before_anything_is_given_up():
    """What did not come back in time makes the room first."""
    kept = ProtectedSet(10)
    kept.admit(holding("late", [1, 2], ttl_s=5.0, tokens=10**6), now_s=0.0)
    kept.admit(holding("here", [3, 4], ttl_s=60.0, tokens=1), now_s=0.0)
    assert kept.give_up(1, now_s=6.0).unpin == {1, 2}
    assert kept.expire(100.0).unpin == {3, 4}


def test_no_budget_protects_nothing():
    """A share of zero is soft retention only."""
    kept = ProtectedSet(0)
    assert kept.admit(holding("c", [1]), now_s=0.0).pin == set()
    assert len(kept) == 0


class Protection(RuleBasedStateMachine):
    """The references that a pool would hold after doing what it is told are those of the set."""

    def __init__(self):
        super().__init__()
        self.kept = ProtectedSet(6)
        self.pinned = set()
        self.now_s = 0.0

    def follow(self, change):
        assert not change.pin & change.unpin
        assert not change.pin & self.pinned, "a block was pinned twice"
        assert change.unpin <= self.pinned, "a block was unpinned that was not held"
        self.pinned = (self.pinned | change.pin) - change.unpin

    @rule(name=st.sampled_from("abcd"), blocks=st.lists(st.integers(0, 9), unique=True, max_size=8),
          ttl_s=st.sampled_from([0.0, 2.0, 99.0]), tokens=st.integers(0, 10**6))  # fmt: skip
    def admit(self, name, blocks, ttl_s, tokens):
        self.follow(
            self.kept.admit(
                holding(name, blocks, since_s=self.now_s, ttl_s=ttl_s, tokens=tokens), now_s=self.now_s
            )
        )

    @rule(name=st.sampled_from("abcd"))
    def release(self, name):
        self.follow(self.kept.release(name))

    @rule(blocks=st.integers(0, 9))
    def give_up(self, blocks):
        before = len(self.pinned)
        self.follow(self.kept.give_up(blocks, now_s=self.now_s))
        assert before - len(self.pinned) >= min(blocks, before)

    @rule(step_s=st.sampled_from([0.5, 50.0]))
    def wait(self, step_s):
        self.now_s += step_s
        self.follow(self.kept.expire(self.now_s))

    @rule()
    def reset(self):
        self.follow(self.kept.release_all())

    @invariant()
    def holds_what_was_pinned(self):
        self.kept.check_integrity()
        assert len(self.kept) == len(self.pinned)


Protection.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestProtection = Protection.TestCase
