"""The last turns of the whole router."""

from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.recent import RecentTurns
from bidikv_server.router.core.reports import TurnReport


@given(turns=st.integers(0, 20), limit=st.integers(1, 12), after=st.integers(0, 22))
def test_newest_first_and_bounded(turns, limit, after):
    """The last ones that are asked for, of the last ten that are kept."""
    recent = RecentTurns(max_turns=10)
    for number in range(1, turns + 1):
        recent.add(TurnReport(f"r{number}", "/v1/x", "ok", 200, 1.0, 0.0), float(number))
    kept = [n for n in range(turns, 0, -1) if n > turns - 10 and n > after]
    found = recent.latest(limit, after=after)
    assert [turn.number for turn in found] == kept[:limit]
    assert all(turn.report.request_id == f"r{turn.number}" and turn.at_s == turn.number for turn in found)
