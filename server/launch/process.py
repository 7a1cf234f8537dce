"""Child processes that end with their launcher: started in groups of their own, logged to files, watched, ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bidikv_server.launch.diagnosis import explain_death
from bidikv_server.launch.errors import ChildDiedError
from bidikv_server.launch.groups import end_groups, group_members, kill_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import FrameType
    from typing import Self

TAIL_LINES: Final = 30
_DIAGNOSED_LINES: Final = 400
_REAP_S: Final = 5.0
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One program to run.

    Attributes:
        name: What messages call it.
        argv: The program and its arguments.
        env: Its whole environment.
        log_path: Where its output goes; a restart appends.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path


class Child:
    """A running child. Made by `Children.start` alone."""

    def __init__(self, spec: ChildSpec, popen: subprocess.Popen[bytes], log_start: int) -> None:
        self.spec = spec
        self._popen = popen
        self._log_start = log_start

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._popen.poll()

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines that it wrote since it was started."""
        with self.spec.log_path.open("rb") as log:
            log.seek(self._log_start)
            return b"".join(deque(log, maxlen=lines)).decode(errors="replace").rstrip()

    def raise_if_dead(self) -> None:
        """Do nothing while it runs.

        Raises:
            ChildDiedError: It ended; the message carries the end of its log.
        """
        code = self.exit_code()
        if code is None:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        tail = self.log_tail() or "(it wrote nothing)"
        fix = explain_death(self.log_tail(_DIAGNOSED_LINES), code)
        raise ChildDiedError(f"{self.spec.name} {how}. {fix}\nLast lines of {self.spec.log_path}:\n{tail}")

    def reap(self) -> None:
        """Collect its exit status once its group was ended."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_S)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let a Ctrl-C wait while a child is started: between its fork and its entry in the books nobody would end it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def defer(number: int, _frame: FrameType | None) -> None:
        pending.append(number)

    previous = {number: signal.signal(number, defer) for number in _STOPPING}
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, signal.SIG_DFL if action is None else action)
        for waiting in pending:
            signal.raise_signal(waiting)


class Children:
    """All children of one launcher: ended together by `close`, or by the guardian if that is never reached."""

    def __init__(self, grace_s: float = 5.0) -> None:
        self._grace_s = grace_s
        self._running: list[Child] = []
        self._lock = threading.Lock()
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", "bidikv_server.launch.guardian"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        """Leave everything as it is."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End every child, then the guardian."""
        self.close()

    def close(self) -> None:
        """End every child, then the guardian. Does nothing the second time."""
        try:
            self.stop(list(self._running))
        finally:
            self._guardian.communicate()

    def start(self, spec: ChildSpec) -> Child:
        """Start a program in a session, and so a group, of its own: Ctrl-C reaches the launcher alone."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log, _signals_deferred():
            log_start = log.tell()
            popen = subprocess.Popen(  # noqa: S603  (the caller's own program)
                spec.argv,
                env=dict(spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            child = Child(spec, popen, log_start)
            self._running.append(child)
            self._tell_guardian(f"+{child.pid}")
        return child

    def stop(self, children: list[Child]) -> None:
        """End these children with all of their descendants."""
        # A leader that died by itself may have left descendants, so its exit code says nothing yet.
        end_groups([child.pid for child in children], self._grace_s)
        self._forget(children)

    def kill(self, child: Child) -> None:
        """End a child with all of its descendants at once, as a crash would."""
        kill_groups([child.pid], self._grace_s)
        self._forget([child])

    def pids(self) -> list[int]:
        """Every process that lives now, descendants included."""
        return [pid for child in self._running for pid in group_members(child.pid)]

    def _forget(self, children: list[Child]) -> None:
        for child in children:
            child.reap()
            self._tell_guardian(f"-{child.pid}")
            self._running.remove(child)

    def _tell_guardian(self, line: str) -> None:
        pipe = self._guardian.stdin
        with self._lock, suppress(BrokenPipeError):
            if pipe is not None and not pipe.closed:
                pipe.write(line + "\n")
                pipe.flush()
