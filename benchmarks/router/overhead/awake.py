"""Keeps the machine's cores from going idle, without taking anything from what is measured.

A core that goes idle has to be woken for the next packet. On a virtual machine that takes longer than the packet's own way:
the host lends the core to others meanwhile. With one process of the lowest class on each core (Linux' SCHED_IDLE: it runs only
while nobody else wants to) what is left is what the systems themselves take.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPIN: Final = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """While this is open no core that this process may use is idle."""
    with contextlib.ExitStack() as stack:
        for core in os.sched_getaffinity(0):
            command = [sys.executable, "-c", _SPIN, str(core), str(os.getpid())]
            spinning = stack.enter_context(subprocess.Popen(command))
            stack.callback(spinning.kill)
        yield
