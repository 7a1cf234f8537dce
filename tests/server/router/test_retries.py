"""Attempts at one turn: how many, and until when."""

import pytest

from bidikv_server.router.errors import UpstreamTimedOut
from bidikv_server.router.legs import Tried
from bidikv_server.router.relay import LegFailed
from bidikv_server.router.retries import Retries, RetryBudget

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("budget_s", "attempts"), [(310.0, 2), (299.0, 1), (300.0, 1), (900.0, 3)])
async def test_the_first_attempt_counts(budget_s, attempts):
    """Engines that hang: no attempt begins later than the budget after the first one began."""
    now_s, begun = 1000.0, []

    async def attempt():
        nonlocal now_s
        begun.append(now_s)
        now_s += 300.0
        raise LegFailed(UpstreamTimedOut("hangs"))

    retries = Retries(
        RetryBudget(attempts=8, total_s=budget_s, refused_wait_s=0.0),
        Tried(watch=None, alone=None),
        exhausted=lambda: False,
        clock=lambda: now_s,
    )
    with pytest.raises(LegFailed):
        await retries.run(attempt)
    assert len(begun) == attempts
