"""LangGraph's suite against a fake router: what reaches it. tests/engines runs the same against real engines."""

from __future__ import annotations

import pytest
from langgraph_suite import LangGraphSuite
from target import chosen_target


@pytest.fixture
def target():
    """The fake router, or the one that BIDIKV_TEST_BASE_URL names."""
    with chosen_target() as target:
        yield target


class TestLangGraph(LangGraphSuite):
    """All of it."""
