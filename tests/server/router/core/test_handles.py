"""Handles: given away once, in time, to the conversation they are of, for a proven append."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bidikv_server.reasons import Reason
from bidikv_server.router.core.digests import chain, with_message
from bidikv_server.router.core.handles import Handle, HandleBook, block_digests, first_blocks, proven_blocks
from bidikv_server.router.core.ids import Scope, session_key

TTL_S = 10.0
ENGINES = ("http://d0", "http://d1")
TENANTS = ("a", "b")
SESSIONS = ("s", "t")
TEXTS = ("x", "y")


def scope(tenant):
    return Scope(tenant=tenant, model="m")


def chained(tenant, texts):
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)
    ]
    return chain({"messages": messages}, scope(tenant))


class Books(RuleBasedStateMachine):
    """A book beside what is true: which handles decode engines hold, and of which messages."""

    def __init__(self):
        super().__init__()
        self.book = HandleBook(max_handles=4, ttl_s=TTL_S)
        self.now_s = 0.0
        self.made = {}
        self.given = set()
        self.lost = set()

    @rule(
        tenant=st.sampled_from(TENANTS),
        session=st.sampled_from(SESSIONS),
        texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5),
        answer=st.sampled_from(TEXTS),
        engine=st.sampled_from(ENGINES),
    )
    def turn_ends(self, tenant, session, texts, answer, engine):
        number = len(self.made)
        handle = Handle(engine, {"remote_request_id": number}, 4, (b"d",))
        self.made[number] = (tenant, session, [*texts, answer], engine, self.now_s)
        key = session_key(scope(tenant), session)
        message = {"role": "user" if len(texts) % 2 == 0 else "assistant", "content": answer}
        self.book.keep(key, with_message(chained(tenant, texts).prefixes[-1], message), handle, self.now_s)

    @rule(
        tenant=st.sampled_from(TENANTS),
        session=st.sampled_from(SESSIONS),
        texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8),
    )
    def request_comes(self, tenant, session, texts):
        self._ask(tenant, session, texts)

    @precondition(lambda self: self.made)
    @rule(data=st.data(), more=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2))
    def append_comes(self, data, more):
        tenant, session, texts, *_ = self.made[data.draw(st.sampled_from(sorted(self.made)))]
        self._ask(tenant, session, [*texts, *more])

    def _ask(self, tenant, session, texts):
        prefixes = chained(tenant, texts).prefixes[:-1]
        found = self.book.take(session_key(scope(tenant), session), prefixes, self.now_s)
        if isinstance(found, Reason):
            assert found in {Reason.EXPIRED, Reason.DIVERGED, Reason.NOT_RETAINED}
            return
        number = found.params["remote_request_id"]
        assert number not in self.given
        self.given.add(number)
        of_tenant, of_session, held, _, made_s = self.made[number]
        assert (of_tenant, of_session) == (tenant, session)
        assert texts[: len(held)] == held
        assert len(texts) > len(held)
        assert self.now_s < made_s + TTL_S
        assert number not in self.lost

    @rule(engine=st.sampled_from(ENGINES))
    def engine_goes_down(self, engine):
        self.book.drop_engine(engine)
        self.lost |= {number for number, made in self.made.items() if made[3] == engine}

    @rule(seconds=st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @invariant()
    def views_agree(self):
        self.book.check_integrity()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_latest_turn_that_is_appended_to():
    """The deepest one, and then the one before; a time that is up is told."""
    book = HandleBook(max_handles=9, ttl_s=TTL_S)
    key = session_key(scope("a"), "s")
    for number, texts in enumerate((["q"], ["q", "x", "r"])):
        end = with_message(chained("a", texts).prefixes[-1], {"role": "assistant", "content": "x"})
        book.keep(key, end, Handle(ENGINES[0], {"number": number}, 4, ()), float(number))
    prefixes = chained("a", ["q", "x", "r", "x", "s"]).prefixes[:-1]
    taken = [book.take(key, prefixes, now_s) for now_s in (5.0, TTL_S, TTL_S)]
    assert isinstance(taken[0], Handle)
    assert taken[0].params == {"number": 1}
    assert taken[1:] == [Reason.EXPIRED, Reason.NOT_RETAINED]


def test_another_handle_of_the_conversation_is_a_divergence():
    """It is kept for a request that does append."""
    book = HandleBook(max_handles=9, ttl_s=TTL_S)
    key = session_key(scope("a"), "s")
    end = with_message(chained("a", ["q"]).prefixes[-1], {"role": "assistant", "content": "x"})
    book.keep(key, end, Handle(ENGINES[0], {}, 4, ()), 0.0)
    assert book.take(key, chained("a", ["q", "other", "r"]).prefixes, 1.0) is Reason.DIVERGED
    assert isinstance(book.take(key, chained("a", ["q", "x", "r"]).prefixes, 1.0), Handle)


@given(
    held=st.lists(st.integers(0, 2), max_size=24),
    branch=st.tuples(st.integers(0, 24), st.lists(st.integers(0, 2), min_size=1, max_size=24)),
    size=st.integers(1, 5),
    whole=st.booleans(),
    spare=st.integers(0, 2),
)
def test_only_equal_whole_blocks(held, branch, size, whole, spare):
    """The blocks that are sent hold exactly the prompt's first tokens, and one token is left to compute."""
    shared, tail = branch
    prompt = [*held[:shared], *tail]
    block_ids = list(range(len(held) // size + spare))
    handle = Handle(
        ENGINES[0], {"remote_block_ids": [block_ids]}, size, block_digests(held, size, len(held)), whole
    )
    blocks = proven_blocks(handle, prompt)
    assert prompt[: blocks * size] == held[: blocks * size]
    assert blocks * size < len(prompt)
    following = prompt[blocks * size : (blocks + 1) * size]
    if blocks and whole:
        assert blocks == len(held) // size
    if (
        not whole
        and len(following) == size
        and blocks < len(held) // size
        and (blocks + 1) * size < len(prompt)
    ):
        assert following != held[blocks * size : (blocks + 1) * size]
    params = first_blocks(handle, blocks)
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([block_ids[:blocks]], blocks * size)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)


@pytest.mark.parametrize("tokens", [0, 3])
def test_less_than_a_block(tokens):
    """There is nothing to prove."""
    assert block_digests([1, 2, 3], 4, tokens) == ()
