"""The protected set: its budget, and the order in which its blocks should be handed out."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bidikv_server.connector.core.protection import CROSSOVER_TOKENS, Holding, ProtectedSet


def holding(name, blocks, *, since_s=0.0, ttl_s=60.0, tokens=1000):
    return Holding(name, tuple(blocks), since_s, since_s + ttl_s, tokens)


def protecting(budget, *holdings, now_s=0.0):
    kept = ProtectedSet(budget)
    for each in holdings:
        kept.admit(each, now_s=now_s)
    return kept


def test_the_earlier_turn_is_superseded():
    """A conversation's next turn takes the place of the one before."""
    kept = protecting(10, holding("c", [1, 2, 3]), holding("c", [1, 2, 7]))
    assert sorted(kept.order(0.0)) == [1, 2, 7]


def test_shared_blocks_count_once_and_stay_until_the_last_holder_goes():
    """Forks share their parent's blocks."""
    kept = protecting(10, holding("parent", [1, 2]), holding("fork", [1, 5]))
    assert len(kept) == 3
    kept.release("parent")
    assert sorted(kept.order(0.0)) == [1, 5]
    assert 1 in kept
    assert 2 not in kept


def test_the_budget_is_never_exceeded():
    """One conversation larger than the budget is protected from its start."""
    assert sorted(protecting(3, holding("c", [1, 2, 3, 4, 5])).order(0.0)) == [1, 2, 3]


def test_the_least_likely_to_return_goes_first():
    """Of two equal conversations the one that has been away for longer is handed out first."""
    kept = protecting(
        10, holding("away", [1, 2], since_s=0.0), holding("fresh", [3, 4], since_s=50.0), now_s=50.0
    )
    assert kept.order(51.0) == [2, 1, 4, 3], "and each from its end"


def test_the_cheapest_to_recompute_goes_first():
    """Of two that are as likely to return, a block of the longer context saves more compute."""
    kept = protecting(
        10, holding("long", [3, 4], tokens=20 * CROSSOVER_TOKENS), holding("short", [1, 2], tokens=100)
    )
    assert kept.order(1.0) == [2, 1, 4, 3]


def test_over_the_budget_the_least_valuable_is_shortened():
    """A newcomer takes the tail of the conversation that is worth least."""
    kept = protecting(4, holding("short", [1, 2], tokens=1), holding("long", [3, 4, 5], tokens=10**6))
    assert sorted(kept.order(0.0)) == [1, 3, 4, 5]


def test_a_lost_block_ends_its_prefix():
    """What follows a block that was handed out is of no use any more, for every conversation that holds it."""
    kept = protecting(10, holding("a", [1, 2, 3]), holding("b", [1, 2, 9]))
    kept.lost(2)
    assert kept.order(0.0) == [1]
    kept.lost(7)
    kept.lost(1)
    assert len(kept) == 0


def test_expired_promises_are_dropped():
    """What did not come back in time is not protected."""
    kept = protecting(10, holding("late", [1, 2], ttl_s=5.0), holding("here", [3, 4]))
    kept.expire(6.0)
    assert sorted(kept.order(6.0)) == [3, 4]


def test_no_budget_protects_nothing():
    """A share of zero is soft retention only."""
    assert len(protecting(0, holding("c", [1]))) == 0


class Protection(RuleBasedStateMachine):
    """Whatever happens, the count, the budget and the order agree."""

    def __init__(self):
        super().__init__()
        self.kept = ProtectedSet(6)
        self.now_s = 0.0

    @rule(name=st.sampled_from("abcd"), blocks=st.lists(st.integers(0, 9), unique=True, max_size=8),
          ttl_s=st.sampled_from([0.0, 2.0, 99.0]), tokens=st.integers(0, 10**6))  # fmt: skip
    def admit(self, name, blocks, ttl_s, tokens):
        each = holding(name, blocks, since_s=self.now_s, ttl_s=ttl_s, tokens=tokens)
        self.kept.admit(each, now_s=self.now_s)

    @rule(name=st.sampled_from("abcd"))
    def release(self, name):
        self.kept.release(name)

    @rule(block=st.integers(0, 9))
    def lose(self, block):
        self.kept.lost(block)
        assert block not in self.kept

    @rule(step_s=st.sampled_from([0.5, 50.0]))
    def wait(self, step_s):
        self.now_s += step_s
        self.kept.expire(self.now_s)

    @invariant()
    def agrees(self):
        self.kept.check_integrity()
        order = self.kept.order(self.now_s)
        assert len(order) == len(set(order)) == len(self.kept)


Protection.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestProtection = Protection.TestCase


def test_losing_a_long_prefix_costs_as_much_as_it_is_long():
    """The pool hands protected blocks out from a prefix's end, one by one, while a request waits for them."""
    blocks = tuple(range(50_000))
    protected = protecting(len(blocks), Holding("c", blocks, 0.0, 100.0, 10))
    for block_id in reversed(blocks):
        protected.lost(block_id)
    assert len(protected) == 0
    protected.check_integrity()


def test_what_was_lost_does_not_come_back():
    """A holding that is shortened for another one's sake regains nothing that the pool took before."""
    protected = protecting(6, Holding("old", (1, 2, 3, 4), 0.0, 100.0, 10))
    protected.lost(3)
    protected.admit(Holding("new", (11, 12, 13, 14, 15), 50.0, 150.0, 10_000), now_s=50.0)
    assert {block_id for block_id in (1, 2, 3, 4) if block_id in protected} <= {1}
    assert all(block_id in protected for block_id in (11, 12, 13, 14, 15))
    protected.check_integrity()


def test_renewing_keeps_what_is_left():
    """Until the later of the two times."""
    protected = protecting(6, Holding("c", (1, 2, 3), 0.0, 10.0, 10))
    protected.lost(3)
    protected.renew("c", 5.0, now_s=2.0)
    protected.expire(9.0)
    assert [block_id in protected for block_id in (1, 2, 3)] == [True, True, False]
    protected.renew("c", 30.0, now_s=9.0)
    protected.expire(29.0)
    assert len(protected) == 2
    protected.expire(30.0)
    assert len(protected) == 0
    protected.renew("c", 99.0, now_s=31.0)
