"""The retention index against a plain model of it, and the reasons it gives."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bidikv_server.connector.core import digests
from bidikv_server.connector.core.retention import RetentionIndex
from bidikv_server.reasons import Reason

NUM_BLOCKS = 12
TTL = 480.0


def chain(*ids):
    return digests.chain(b"seed", ids, block_size=1, blocks=len(ids)).digests


def retained(index, conversation, ids, blocks, *, now_s=0.0, ttl_s=TTL):
    index.retain(conversation, chain(*ids), blocks, now_s=now_s, ttl_s=ttl_s)
    return index


def test_finds_the_longest_proven_prefix():
    """A prompt that extends the turn gets all of it, in order."""
    index = retained(RetentionIndex(9), "c", [1, 2, 3], [5, 4, 8])
    match = index.lookup("c", chain(1, 2, 3, 4), now_s=1.0)
    assert (match.block_ids, match.reason) == ((5, 4, 8), Reason.HIT)


def test_a_changed_token_ends_the_match():
    """Nothing after the change is offered, though decode holds blocks at those positions."""
    index = retained(RetentionIndex(9), "c", [1, 2, 3], [5, 4, 8])
    match = index.lookup("c", chain(1, 9, 3), now_s=1.0)
    assert (match.block_ids, match.reason) == ((5,), Reason.DIVERGED)


def test_a_truncated_prompt_is_a_hit():
    """A prompt that is a prefix of the turn gets exactly its own blocks."""
    index = retained(RetentionIndex(9), "c", [1, 2, 3], [5, 4, 8])
    match = index.lookup("c", chain(1, 2), now_s=1.0)
    assert (match.block_ids, match.reason) == ((5, 4), Reason.HIT)


def test_reading_does_not_consume():
    """Retries, hedges and forks read the same blocks."""
    index = retained(RetentionIndex(9), "c", [1, 2], [5, 4])
    assert index.lookup("c", chain(1, 2, 3), now_s=1.0) == index.lookup("c", chain(1, 2, 3), now_s=2.0)


def test_expired_blocks_are_not_offered():
    """The TTL bounds an entry's life, and the reason says so, more than once."""
    index = retained(RetentionIndex(9), "c", [1, 2], [5, 4], ttl_s=10.0)
    assert index.lookup("other", chain(1, 2), now_s=9.99).reason is Reason.HIT
    for now_s in (10.0, 11.0):
        match = index.lookup("c", chain(1, 2), now_s=now_s)
        assert (match.block_ids, match.reason) == ((), Reason.EXPIRED)


def test_blocks_handed_out_are_not_offered_and_invalidate_reads():
    """A read that was promised the block before it was handed out is no longer believed."""
    index = retained(RetentionIndex(9), "c", [1, 2], [5, 4])
    match = index.lookup("c", chain(1, 2, 3), now_s=1.0)
    assert index.valid(match.block_ids, match.generations)
    index.reused(4)
    assert not index.valid(match.block_ids, match.generations)
    assert index.valid(match.block_ids[:1], match.generations[:1])
    after = index.lookup("c", chain(1, 2, 3), now_s=1.0)
    assert (after.block_ids, after.reason) == ((5,), Reason.EVICTED)


def test_a_block_retained_again_does_not_validate_an_old_read():
    """The same block id with other contents is another block."""
    index = retained(RetentionIndex(9), "c", [1], [5])
    match = index.lookup("c", chain(1), now_s=1.0)
    index.reused(5)
    retained(index, "d", [7], [5])
    assert not index.valid(match.block_ids, match.generations)


def test_unknown_conversations_and_malformed_validations():
    """A stranger gets nothing; indices out of range are invalid, not errors."""
    index = retained(RetentionIndex(9), "c", [1], [5])
    assert index.lookup("x", chain(3), now_s=0.0).reason is Reason.NOT_RETAINED
    assert index.lookup("c", (), now_s=0.0).reason is Reason.HIT
    assert not index.valid([99], [0])
    assert not index.valid([-1], [0])
    assert not index.valid([5], [])


def test_a_shared_prefix_is_found_whichever_conversation_asks():
    """Forked conversations share their parent's blocks."""
    index = retained(RetentionIndex(9), "parent", [1, 2], [5, 4])
    match = index.lookup("fork", chain(1, 2, 3), now_s=0.0)
    assert (match.block_ids, match.reason) == ((5, 4), Reason.HIT)


def test_memory_of_losses_is_bounded():
    """Explaining misses costs memory in proportion to the pool, not to the traffic."""
    index = RetentionIndex(4)
    for turn in range(200):
        retained(index, f"c{turn}", [turn, turn + 1000], [turn % 4, (turn + 1) % 4])
        index.reused(turn % 4)
        index.reused((turn + 1) % 4)
    assert len(index._memory._lost) <= 16
    assert index._memory._digests <= 16
    index.check_integrity()


def test_release_drops_what_nobody_else_is_made_of():
    """An ended conversation's own blocks go; what a fork shares with it stays."""
    index = retained(RetentionIndex(9), "c", [1, 2], [5, 4])
    retained(index, "fork", [1, 9], [5, 6])
    index.release("c")
    assert index.lookup("c", chain(1, 2), now_s=0.0).block_ids == (5,)
    assert index.lookup("c", chain(1, 2), now_s=0.0).reason is Reason.RELEASED
    assert index.lookup("fork", chain(1, 9), now_s=0.0).block_ids == (5, 6)
    index.release("unknown")
    index.check_integrity()


def test_handing_everything_out_confirms_nothing():
    """What a reset of the engine's caches does, block by block: no read under way is believed, and losses are told once."""
    index = retained(RetentionIndex(9), "c", [1], [5])
    match = index.lookup("c", chain(1), now_s=0.0)
    index.reused(5)
    assert not index.valid(match.block_ids, match.generations)
    assert len(index) == 0
    assert index.take_losses() == {"evicted": 1}
    assert index.take_losses() == {}


def test_a_conversation_that_asks_is_alive():
    """Its turn is kept for its own time again; another conversation that shares the prefix renews nothing."""
    index = retained(RetentionIndex(9), "c", [1, 2], [5, 4], ttl_s=10.0)
    index.lookup("c", chain(1, 2, 3), now_s=9.0)
    assert index.lookup("other", chain(1, 2), now_s=18.9).reason is Reason.HIT
    assert index.lookup("other", chain(1, 2), now_s=19.0).reason is Reason.EXPIRED


def test_renewal_never_shortens_and_revives_nothing():
    """A later wish counts when it reaches further; what has expired or was never there stays away."""
    index = retained(RetentionIndex(9), "c", [1], [5], ttl_s=10.0)
    assert index.renew("c", now_s=0.0, ttl_s=5.0)
    assert index.lookup("other", chain(1), now_s=9.0).reason is Reason.HIT
    assert index.renew("c", now_s=9.0, ttl_s=20.0)
    assert index.lookup("other", chain(1), now_s=28.0).reason is Reason.HIT
    assert not index.renew("c", now_s=29.0, ttl_s=20.0)
    assert not index.renew("nobody", now_s=0.0, ttl_s=20.0)
    assert index.lookup("c", chain(1), now_s=29.0).reason is Reason.EXPIRED


def test_a_diverged_prompt_is_told_what_was_retained():
    """The packed tokens of the block at which the match ends; nothing for any other miss."""
    index = RetentionIndex(9)
    made = digests.chain(b"seed", [1, 2, 3, 4, 5, 6], block_size=2, blocks=3)
    index.retain("c", made.digests, [1, 2, 3], now_s=0.0, ttl_s=TTL, tokens=made.tokens)
    edited = digests.chain(b"seed", [1, 2, 3, 9, 5, 6], block_size=2, blocks=3)
    match = index.lookup("c", edited.digests, now_s=1.0)
    assert (match.reason, match.retained) == (Reason.DIVERGED, digests.pack([3, 4]))
    assert index.lookup("c", made.digests, now_s=1.0).retained == b""
    assert index.lookup("other", edited.digests, now_s=1.0).retained == b""


def test_a_branch_that_was_left_is_nobodys_change():
    """A prompt that goes on where another branch of its conversation ends has not diverged; one that leaves the last turn has."""
    index = retained(RetentionIndex(19), "c", [1, 2], [1, 2])
    retained(index, "c", [1, 2, 3], [1, 2, 3])
    retained(index, "c", [1, 2, 7, 8, 9], [1, 2, 4, 5, 6])
    for ids, reason in (
        ([1, 2, 3, 4], Reason.HIT),
        ([1, 2, 7, 8, 9, 10], Reason.HIT),
        ([1, 2, 4], Reason.DIVERGED),
        ([1, 2, 7, 4], Reason.DIVERGED),
    ):
        assert index.lookup("c", chain(*ids), now_s=1.0).reason is reason
    index.check_integrity()


def test_branches_are_bounded():
    """Of very many branches, those that were left longest ago are taken for the past of the last one."""
    index = RetentionIndex(99)
    for number in range(50):
        retained(index, "c", [1, 100 + number], [1, 2 + number])
    retained(index, "c", [1, 2, 3], [1, 60, 61])
    reasons = [index.lookup("c", chain(1, 100 + number, 9), now_s=1.0).reason for number in range(50)]
    assert reasons == [Reason.DIVERGED] * 19 + [Reason.HIT] * 31


def test_expiring_in_slices_ends_with_nothing_left():
    """Each call looks at no more digests than it may; what was renewed is looked at again later."""
    index = retained(RetentionIndex(9), "a", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], ttl_s=10.0)
    retained(index, "b", [1, 2], [1, 2], ttl_s=30.0)
    assert index.expire(9.9, limit=2) == 0
    assert [index.expire(10.0, limit=2) for _ in range(4)] == [2, 2, 1, 0]
    assert len(index) == 2
    assert index.expire(30.0, limit=9) == 2
    assert (len(index), index.take_losses()) == (0, {"expired": 5})


def test_a_superseded_turns_deadline_does_not_end_its_successors_blocks():
    """Every turn lists its whole prefix; only the last one's time counts."""
    index = retained(RetentionIndex(9), "c", [1, 2], [1, 2], ttl_s=10.0)
    retained(index, "c", [1, 2, 3], [1, 2, 3], now_s=5.0, ttl_s=10.0)
    index.expire(10.0, limit=100)
    assert len(index) == 3
    index.expire(15.0, limit=100)
    assert len(index) == 0


def test_the_memory_of_deadlines_is_bounded():
    """However often a conversation comes back before its time is up."""
    index = RetentionIndex(4)
    for turn in range(500):
        retained(index, "c", [1, 2, 3], [1, 2, 3], now_s=float(turn), ttl_s=1e6)
        index.check_integrity()
        assert len(index._deadlines) <= 2 * (4 * 4 + 3)


def test_a_turn_that_may_have_been_given_up_explains_nothing():
    """It is found like any other, but a later prompt is compared with the turn before."""
    index = retained(RetentionIndex(9), "c", [1, 2], [1, 2])
    index.retain("c", chain(1, 7), [3, 4], now_s=0.0, ttl_s=TTL, complete=False)
    assert index.lookup("c", chain(1, 7, 8), now_s=1.0).block_ids == (3, 4)
    assert index.lookup("c", chain(1, 2, 8), now_s=1.0).reason is Reason.HIT
    index.release("c")
    assert index.lookup("c", chain(1, 7), now_s=1.0).reason is Reason.RELEASED
    assert len(index) == 0


def test_a_conversation_of_turns_that_may_have_been_given_up():
    """Where every turn ends by a stop string, the last one explains, is renewed and is released like any other."""
    index = RetentionIndex(9)
    for ids, blocks in (([1, 2], [1, 2]), ([1, 2, 3], [1, 2, 3])):
        index.retain("c", chain(*ids), blocks, now_s=0.0, ttl_s=10.0, complete=False)
    assert index.lookup("c", chain(1, 2, 9), now_s=1.0).reason is Reason.DIVERGED
    assert index.renew("c", now_s=9.0, ttl_s=10.0)
    assert len(index.lookup("other", chain(1, 2, 3), now_s=18.0).block_ids) == 3
    assert index.release("c")
    assert len(index) == 0
    assert not index.release("c")


def test_release_reaches_every_branch():
    """An edited history leaves blocks that the conversation's last turn is not made of."""
    index = retained(RetentionIndex(9), "c", [1, 2, 3], [1, 2, 3])
    retained(index, "c", [1, 9], [1, 4])
    retained(index, "other", [1], [1])
    index.release("c")
    assert index.lookup("c", chain(1, 2), now_s=1.0).block_ids == (1,)
    assert index.take_losses() == {"released": 3}


class Retention(RuleBasedStateMachine):
    """Random turns, hand-outs, expiries and lookups against a model that keeps every block's true content."""

    def __init__(self):
        super().__init__()
        self.index = RetentionIndex(NUM_BLOCKS)
        self.now_s = self.swept_s = 0.0
        self.content = {}  # block -> digest, as the pool would really hold
        self.handed_out = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.promises = []

    @rule(
        ids=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        data=st.data(),
        ttl_s=st.sampled_from([1.0, 50.0]),
    )
    def finish_turn(self, ids, data, ttl_s):
        blocks = data.draw(
            st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=len(ids), max_size=len(ids), unique=True)
        )
        names = chain(*ids)
        for block, name in zip(blocks, names, strict=True):
            if self.content.get(block) != name:
                self.hand_out(block)
                self.content[block] = name
        self.index.retain(f"c{ids[0]}", names, blocks, now_s=self.now_s, ttl_s=ttl_s)

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=5), keep=st.integers(0, NUM_BLOCKS - 1))
    def end_a_turn_perhaps(self, ids, keep):
        """A turn whose blocks were all handed out for it, and that may have been given up."""
        names = chain(*ids)
        for block, name in enumerate(names):
            self.hand_out(block)
            self.content[block] = name
        self.index.retain(
            f"c{ids[0]}", names, range(len(ids)), now_s=self.now_s, ttl_s=20.0, complete=False, keep={keep}
        )

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def hand_out(self, block):
        self.content.pop(block, None)
        self.handed_out[block] += 1
        self.index.reused(block)

    @rule(name=st.integers(0, 2))
    def release(self, name):
        self.index.release(f"c{name}")

    @rule(name=st.integers(0, 2), ttl_s=st.sampled_from([2.0, 80.0]))
    def renew(self, name, ttl_s):
        self.index.renew(f"c{name}", now_s=self.now_s, ttl_s=ttl_s)

    @rule(step_s=st.sampled_from([0.5, 5.0, 100.0]))
    def wait(self, step_s):
        self.now_s += step_s
        while self.index.expire(self.now_s, limit=3) == 3:
            pass
        self.swept_s = self.now_s

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def look_up(self, ids):
        names = chain(*ids)
        match = self.index.lookup(f"c{ids[0]}", names, now_s=self.now_s)
        for block, name in zip(match.block_ids, names, strict=False):
            assert self.content[block] == name, "offered a block that holds something else"
        assert self.index.valid(match.block_ids, match.generations)
        self.promises.append((match, {b: self.handed_out[b] for b in match.block_ids}))

    @invariant()
    def only_untouched_promises_are_valid(self):
        for match, then in self.promises[-8:]:
            untouched = all(self.handed_out[block] == count for block, count in then.items())
            assert self.index.valid(match.block_ids, match.generations) == untouched

    @invariant()
    def nothing_outlives_its_time(self):
        assert all(entry.expires_at_s > self.swept_s for entry in self.index._entries.values())

    @invariant()
    def maps_agree(self):
        self.index.check_integrity()


Retention.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestRetention = Retention.TestCase
