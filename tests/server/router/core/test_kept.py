"""Which engine keeps a response: bounded, expiring, and per tenant."""

from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.digests import Digest
from bidikv_server.router.core.ids import ConversationKey, EngineUrl
from bidikv_server.router.core.kept import Kept, KeptResponses


def kept(name="e"):
    return Kept(EngineUrl(name), ConversationKey("c"), Digest(b"d"))


def test_found_by_its_tenant_alone():
    """Another tenant's name is unknown, and so is one that runs into the tenant's."""
    table = KeptResponses(max_responses=9, ttl_s=10)
    table.keep("a", "bc", kept(), 0)
    assert table.find("a", "bc", 1) == kept()
    assert table.find("b", "bc", 1) is None
    assert table.find("ab", "c", 1) is None


def test_expires():
    """At its time, not before, and with it its memory."""
    table = KeptResponses(max_responses=9, ttl_s=10)
    table.keep("a", "r", kept(), 0)
    assert table.find("a", "r", 9.9) is not None
    assert table.find("a", "r", 10) is None
    assert len(table) == 0


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("rstu"), st.integers(0, 5)), max_size=40),
)
def test_agrees_with_a_list(bound, steps):
    """The newest ones within the bound that are not past their time, and no others."""
    table, model, now = KeptResponses(max_responses=bound, ttl_s=7), [], 0
    for number, (tenant, name, wait) in enumerate(steps):
        now += wait
        table.keep(tenant, name, kept(str(number)), now)
        model = [entry for entry in model if entry[0] != (tenant, name) and entry[2] > now]
        model = [*model, ((tenant, name), kept(str(number)), now + 7)][-bound:]
        for key in [(t, n) for t in "ab" for n in "rstu"]:
            expected = next((value for known, value, until in model if known == key and until > now), None)
            assert table.find(*key, now) == expected
        assert len(table) == len(model)
