"""The wire tests of openai-agents and pydantic-ai with the oldest and the newest version of each that is supported.

Neither is installed here: they ask for other versions of what the engines need. Their own files alone are put before the
interpreter's others, with the OpenAI client that the oldest ones want.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from other_versions import install, run_tests

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STACKS = {
    "oldest": (
        "openai-agents==0.13.0",
        "pydantic-ai-slim==2.2.0",
        "pydantic-graph==2.2.0",
        "openai==2.29.0",  # the oldest that both of them take
    ),
    "newest": ("openai-agents==0.24.0", "pydantic-ai-slim==2.68.0", "pydantic-graph==2.68.0"),
}
BOTH = ("genai-prices==0.2.3", "logfire-api==5.6.0")


@pytest.mark.timeout(300)  # an installation and a test run of its own
@pytest.mark.parametrize("stack", STACKS)
def test_other_versions(stack, tmp_path):
    """All wire tests of both pass, and none is skipped."""
    install(tmp_path, *STACKS[stack], *BOTH, what=f"the {stack} frameworks")
    told = run_tests(
        tmp_path,
        (HERE / f"test_{name}.py" for name in ("openai_agents", "pydantic_ai")),
        *("-W", "default"),
        root=ROOT,
        timeout_s=100,
        OPENAI_AGENTS_DISABLE_TRACING="1",
    )
    assert "skipped" not in told
