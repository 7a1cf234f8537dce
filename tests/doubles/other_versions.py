"""Packages in other versions than the environment's: installed beside the interpreter's own, for one test, and put before them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def install(folder: Path, *requirements: str, what: str, timeout_s: float = 100) -> None:
    """Install these packages alone, without what they ask for, into a folder; skip where they cannot be had.

    Args:
        folder: An empty one.
        requirements: Names and versions.
        what: They are, for the reason of a skip.
        timeout_s: For pip.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    done = subprocess.run(
        [*pip, "--no-deps", "--target", str(folder), *requirements],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode != 0 and "No matching distribution" in done.stderr + done.stdout:
        pytest.skip(f"{what} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def run_tests(
    folder: Path, files: Iterable[Path], *options: str, root: Path, timeout_s: float, **environment: str
) -> str:
    """Run test files with what is installed in a folder, in a process of its own; what that printed. All must pass."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *options,
            *(str(file) for file in files),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, **environment},
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
