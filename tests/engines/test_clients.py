"""The suites of the clients and of LangGraph once more, on real engines: what they answer, and what they reuse."""

import pytest

pytest.importorskip("langchain", reason="the agents are LangChain's")

from client_suite import ClientSuite
from langgraph_suite import LangGraphSuite
from target import Engines

from .conftest import BLOCK


@pytest.fixture
def target(cluster):
    """The session's cluster, for a caller of its own."""
    target = Engines(cluster.base_url, cluster.model_name, BLOCK)
    yield target
    target.close()


class TestClients(ClientSuite):
    """What tests/sdk/test_client_suite.py asks of a fake router."""


class TestLangGraph(LangGraphSuite):
    """What tests/sdk/integrations/test_langgraph_suite.py asks of a fake router."""
