"""The same tests with the oldest LangGraph and LangChain that are supported; the newest ones are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_versions import install, run_tests

HERE = Path(__file__).parent
OLDEST = (
    "langgraph==1.0.5",
    "langgraph-checkpoint==3.0.1",
    "langgraph-prebuilt==1.0.5",
    "langchain==1.2.0",
    "langchain-core==1.2.1",
    "langchain-openai==1.1.0",
)
FILES = ("langgraph", "langgraph_suite", "config", "messages", "lineage", "adapters", "outer_retries")


@pytest.mark.timeout(300)  # an installation and a test run of its own
def test_the_oldest_langgraph(tmp_path):
    """Those packages alone are installed beside the interpreter's others, and take their place."""
    install(tmp_path, *OLDEST, what="the oldest LangGraph")
    run_tests(tmp_path, (HERE / f"test_{name}.py" for name in FILES), root=HERE.parents[2], timeout_s=180)
