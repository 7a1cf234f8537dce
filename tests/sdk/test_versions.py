"""The wire tests and the clients' suite once more, with the oldest openai that is supported; the newest one is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
VERSIONS = tuple(os.environ.get("BIDIKV_TEST_OPENAI", "2.25.0").split(","))
"""`BIDIKV_TEST_OPENAI=2.25.0,2.54.0,3.0.0 pytest tests/sdk/test_versions.py` tries more."""


@pytest.mark.parametrize("version", VERSIONS)
def test_another_version_of_openai(version, tmp_path):
    """That package alone is installed beside the interpreter's others, and takes their place."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    done = subprocess.run(
        [*pip, "--target", str(tmp_path), f"openai=={version}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode != 0 and "No matching distribution" in done.stderr + done.stdout:
        pytest.skip(f"openai {version} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    tests = ["test_wire.py", "test_retry.py", "test_responses.py", "test_client_suite.py"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
        "BIDIKV_TEST_OPENAI_IS": version,
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(str(TESTS / name) for name in tests),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parents[1],
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
