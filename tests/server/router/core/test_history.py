"""The memory of turns, against a model of it."""

import gc
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bidikv_server.reasons import Reason
from bidikv_server.router.core.choices import Placement
from bidikv_server.router.core.history import History, TurnRecord
from bidikv_server.router.core.ids import ConversationKey, EngineUrl, Scope, fingerprint

RECORD = TurnRecord(
    turn=b"0123456789abcdef",
    reason=Reason.HIT,
    placement=Placement.HOME,
    prompt_tokens=100,
    remote_tokens=64,
    local_tokens=16,
    computed_tokens=20,
    diverged_at_token=None,
    prefill=EngineUrl("http://p"),
    decode=EngineUrl("http://d"),
    ttft_s=0.5,
    at_s=1.0,
)
SCOPE = Scope("t", "m")
KEY = ConversationKey(fingerprint("k"))


def history(**bounds) -> History:
    return History(**{"max_conversations": 100, "max_records": 16, "idle_s": 1000.0, **bounds})


COUNTS = st.none() | st.integers(0, 2**31 - 1)
URLS = st.sampled_from(["http://a", "http://b", "http://c"]).map(EngineUrl)


@given(
    st.builds(
        TurnRecord,
        turn=st.just(b"") | st.binary(min_size=16, max_size=16).filter(any),
        reason=st.sampled_from(Reason),
        placement=st.sampled_from(Placement),
        prompt_tokens=COUNTS,
        remote_tokens=COUNTS,
        local_tokens=COUNTS,
        computed_tokens=COUNTS,
        diverged_at_token=COUNTS,
        prefill=st.none() | URLS,
        decode=st.none() | URLS,
        ttft_s=st.floats(0, 1e6, width=32),
        at_s=st.floats(0, 1e9),
    )
)
def test_a_record_comes_back_as_it_was(record):
    """Packing loses nothing."""
    known = history()
    known.record(KEY, SCOPE, record)
    assert known.find(KEY, record.at_s).records == (record,)


def test_counts_beyond_belief():
    """A number that no engine can mean is capped, not an error."""
    known = history()
    known.record(KEY, SCOPE, replace(RECORD, prompt_tokens=2**80))
    assert known.find(KEY, 1.0).records[0].prompt_tokens == 2**31 - 1


def test_more_engines_than_numbers(monkeypatch):
    """Engines beyond the last number are not told apart, and nothing breaks."""
    monkeypatch.setattr("bidikv_server.router.core.history._UNKNOWN", 2)
    known = history()
    for number in range(4):
        known.record(KEY, SCOPE, replace(RECORD, prefill=None, decode=EngineUrl(f"http://{number}")))
    found = [record.decode for record in known.find(KEY, 1.0).records]
    assert found == ["http://0", "http://1", None, None]


def test_last_records_stay():
    """The oldest record of a conversation goes first; the first turn's scope stays."""
    known = history(max_records=2)
    for at_s in (1.0, 2.0, 3.0):
        known.record(KEY, SCOPE, replace(RECORD, at_s=at_s))
    found = known.find(KEY, 3.0)
    assert [record.at_s for record in found.records] == [2.0, 3.0]
    assert (found.tenant, found.model) == ("t", "m")


def test_only_the_tenant_finds():
    """A foreign conversation is none; without a tenant anybody's is found."""
    known = history()
    known.record(KEY, SCOPE, RECORD)
    assert known.find(KEY, 1.0, tenant="t") == known.find(KEY, 1.0)
    assert known.find(KEY, 1.0, tenant="u") is None
    assert known.find(KEY, 1.0, tenant="") is None
    assert known.page(1.0, limit=9, tenant="u") == ((), False)


def test_pages():
    """Newest first; a page goes on where the last one ended, also when conversations are used meanwhile."""
    known = history()
    for number in range(5):
        known.record(ConversationKey(str(number) * 32), SCOPE, RECORD)
    page, more = known.page(1.0, limit=2)
    assert ([found.key[0] for found in page], more) == (["4", "3"], True)
    known.record(ConversationKey("1" * 32), SCOPE, RECORD)
    page, more = known.page(1.0, limit=2, tenant="t", before=page[-1].stamp)
    assert ([found.key[0] for found in page], more) == (["2", "0"], False)


@pytest.mark.parametrize("tenants", [1, 2000])
def test_memory(tenants):
    """A conversation with all its records costs well under 2 KB."""
    count = 2000
    scopes = [Scope(fingerprint("tenant", str(number)), "m") for number in range(tenants)]
    gc.collect()
    tracemalloc.start()
    try:
        known = history(max_conversations=count)
        for number in range(count):
            key = ConversationKey(fingerprint(str(number)))
            for _ in range(16):
                known.record(key, scopes[number % tenants], replace(RECORD, at_s=1.0))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(known) == count
    assert used / count < 2000


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class HistoryAgainstModel(RuleBasedStateMachine):
    """Any mix of turns, releases, tenants and idle time, with small bounds."""

    keys = st.sampled_from("abcde").map(lambda name: ConversationKey(name * 32))

    def __init__(self):
        super().__init__()
        self.known = history(max_conversations=3, max_records=2, idle_s=50.0)
        self.model = {}
        self.now_s = 0.0

    @staticmethod
    def scope(key):
        return Scope("t" if key < "d" else "u", "m")

    def alive(self):
        self.model = {k: times for k, times in self.model.items() if self.now_s - times[-1] < 49.99}
        return list(reversed(self.model))

    @rule(key=keys)
    def turn(self, key):
        self.alive()
        self.known.record(key, self.scope(key), replace(RECORD, at_s=self.now_s))
        self.model[key] = [*self.model.pop(key, []), self.now_s][-2:]
        if len(self.model) > 3:
            del self.model[next(iter(self.model))]

    @rule(key=keys)
    def forget(self, key):
        self.known.forget(key)
        self.model.pop(key, None)

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 60.0]))
    def wait(self, seconds):
        self.now_s += seconds

    @rule(limit=st.integers(1, 3), tenant=st.sampled_from(["t", "u", None]))
    def list(self, limit, tenant):
        expected = [key for key in self.alive() if tenant in {None, self.scope(key).tenant}]
        listed, before, more = [], None, True
        while more:
            page, more = self.known.page(self.now_s, limit=limit, tenant=tenant, before=before)
            assert len(page) == limit or not more
            listed += page
            before = page[-1].stamp if page else None
        assert [found.key for found in listed] == expected
        assert [[r.at_s for r in found.records] for found in listed] == [self.model[k][-1:] for k in expected]
        for key in expected:
            assert [r.at_s for r in self.known.find(key, self.now_s).records] == self.model[key]

    @invariant()
    def is_whole(self):
        self.known.check_integrity()


TestHistoryAgainstModel = HistoryAgainstModel.TestCase
