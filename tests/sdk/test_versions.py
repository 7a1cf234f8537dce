"""The wire tests and the clients' suite once more, with the oldest openai that is supported; the newest one is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from other_versions import install, run_tests

TESTS = Path(__file__).parent
VERSIONS = tuple(os.environ.get("BIDIKV_TEST_OPENAI", "2.25.0").split(","))
"""`BIDIKV_TEST_OPENAI=2.25.0,2.54.0,3.0.0 pytest tests/sdk/test_versions.py` tries more."""


@pytest.mark.parametrize("version", VERSIONS)
def test_another_version_of_openai(version, tmp_path):
    """That package alone is installed beside the interpreter's others, and takes their place."""
    install(tmp_path, f"openai=={version}", what=f"openai {version}", timeout_s=60)
    tests = ("test_wire.py", "test_retry.py", "test_responses.py", "test_client_suite.py")
    run_tests(
        tmp_path,
        (TESTS / name for name in tests),
        root=TESTS.parents[1],
        timeout_s=110,
        BIDIKV_TEST_OPENAI_IS=version,
    )
