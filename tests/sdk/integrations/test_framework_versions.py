"""The wire tests of openai-agents and pydantic-ai with the oldest and the newest version of each that is supported.

Neither is installed here: they ask for other versions of what the engines need. Their own files alone are put before the
interpreter's others, with the OpenAI client that the oldest ones want.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    done = subprocess.run(
        [*pip, "--no-deps", "--target", str(tmp_path), *STACKS[stack], *BOTH],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if done.returncode != 0 and "No matching distribution" in done.stderr + done.stdout:
        pytest.skip(f"the {stack} frameworks cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"),
            *(str(HERE / f"test_{name}.py") for name in ("openai_agents", "pydantic_ai")),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
