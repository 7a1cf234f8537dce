"""What is written to the shared state is read back as it was: every field of everything."""

from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_server.reasons import Reason
from bidikv_server.router.core.choices import Mode, ModeReason, Placement, PrefillChoice
from bidikv_server.router.core.conversations import Holder
from bidikv_server.router.core.engines import IndexInfo
from bidikv_server.router.core.history import TurnRecord
from bidikv_server.router.core.ids import ConversationKey, EngineUrl, Scope
from bidikv_server.router.state.codec import (
    BadValue,
    Reader,
    holder_name,
    read_match,
    write_holder,
    write_told,
)

from .conftest import prompt

KEY = ConversationKey("ab" * 16)
COUNTS = st.none() | st.integers(0, 2**31 - 1)
RECORDS = st.builds(
    TurnRecord,
    turn=st.binary(max_size=16),
    reason=st.sampled_from(Reason),
    placement=st.sampled_from(Placement),
    prompt_tokens=COUNTS,
    remote_tokens=COUNTS,
    local_tokens=COUNTS,
    computed_tokens=COUNTS,
    diverged_at_token=COUNTS,
    prefill=st.none() | st.text().map(EngineUrl),
    decode=st.none() | st.text().map(EngineUrl),
    ttft_s=st.integers(0, 10**9).map(lambda number: number / 1e6),
    at_s=st.floats(0, 1e10),
    prefill_choice=st.sampled_from(PrefillChoice),
    mode=st.sampled_from(Mode),
    mode_reason=st.sampled_from(ModeReason),
)


@given(RECORDS, st.text(max_size=20), st.text(max_size=20))
def test_records(record, tenant, model):
    """Records, with names in any alphabet."""
    reader = Reader()
    told = write_told(Scope(tenant, model), record)
    known = reader.known(KEY, [told], b"17")
    assert (known.tenant, known.model, known.records, known.stamp) == (tenant, model, (record,), 17)
    assert reader.bad == 0


def test_every_field_of_a_record_is_written():
    """A field that is added to what is told of a turn is added to what routers share of it."""
    assert {field.name for field in fields(TurnRecord)} == set(RECORDS.wrapped_strategy.kwargs)


@given(st.text(), st.lists(st.tuples(st.text(), st.text())))
def test_holders(engine, indexes):
    """Holders, under their names."""
    holder = Holder(EngineUrl(engine), tuple(IndexInfo(*pair) for pair in indexes))
    data, reader = write_holder(holder), Reader()
    if len(data) <= 4096:
        reader.holders([holder_name(data), data])
        assert reader.nameless(holder_name(data)).holder == holder


ANYTHING = st.recursive(
    st.none() | st.integers() | st.binary() | st.text() | st.just(b"\0" * 40) | st.just(b"\0" * 16),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=50)
@given(ANYTHING, ANYTHING, st.lists(ANYTHING, min_size=10, max_size=10))
def test_answers_of_any_shape(answer, told, fields):
    """Whatever a server says, it is understood or refused, and nothing else happens."""
    for value in (answer, fields):
        try:
            match, gone, bad = read_match(value, prompt("a", "b"), 0)
        except BadValue:
            continue
        assert type(gone) is bool
        assert bad >= 0 or isinstance(fields[0], int)
        assert match.depth == 2
    reader = Reader()
    reader.listed(answer, told, answer)
    reader.known(KEY, [told, answer], answer)
    reader.turn(answer, told)
