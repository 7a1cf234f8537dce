"""The same tests with the oldest LangGraph and LangChain that are supported; the newest ones are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    done = subprocess.run(
        [*pip, "--no-deps", "--target", str(tmp_path), *OLDEST],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if done.returncode != 0 and "No matching distribution" in done.stderr + done.stdout:
        pytest.skip(f"the oldest LangGraph cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(str(HERE / f"test_{name}.py") for name in FILES),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[2],
        env={**os.environ, "PYTHONPATH": path},
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
