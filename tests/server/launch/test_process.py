"""Children: started, logged, watched and ended with all of their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from bidikv_server.launch.errors import ChildDiedError
from bidikv_server.launch.groups import end_groups, group_members
from bidikv_server.launch.process import Child, Children, ChildSpec

if TYPE_CHECKING:
    from pathlib import Path

FAMILY = """
import signal, subprocess, sys, time
{parent}
child = subprocess.Popen([sys.executable, "-c", '''{child}\nprint("child up", flush=True)\nimport time\ntime.sleep(600)'''])
print("parent up", flush=True)
time.sleep(600)
"""
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def eventually(condition, timeout_s=15.0):
    """Wait until a condition holds, looking often."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition never held"
        time.sleep(0.02)


def spec(tmp_path: Path, program: str, name: str = "engine") -> ChildSpec:
    argv = (sys.executable, "-c", textwrap.dedent(program))
    return ChildSpec(name, argv, dict(os.environ), tmp_path / f"{name}.log")


def family(tmp_path: Path, parent: str = "", child: str = "") -> ChildSpec:
    return spec(tmp_path, FAMILY.format(parent=parent, child=child))


def is_up(child: Child) -> bool:
    return {"parent up", "child up"} <= set(child.log_tail().splitlines())


def test_a_killed_child_goes_at_once_with_its_family(tmp_path):
    """As in a crash: nobody is asked, not even those who would refuse."""
    with Children() as children:
        child = children.start(family(tmp_path, parent=IGNORE, child=IGNORE))
        other = children.start(spec(tmp_path, "import time; time.sleep(600)", "other"))
        eventually(lambda: is_up(child))
        children.kill(child)
        assert group_members(child.pid) == []
        assert child.exit_code() == -signal.SIGKILL
        assert other.exit_code() is None


def test_leaving_the_context_ends_the_whole_family(tmp_path):
    """A child's own children go with it."""
    with Children() as children:
        child = children.start(family(tmp_path))
        eventually(lambda: is_up(child))
        assert len(children.pids()) == 2
    assert group_members(child.pid) == []
    assert child.exit_code() == -signal.SIGTERM


def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    """A descendant that does not listen delays the end, and cannot prevent it."""
    children = Children(grace_s=0.3)
    child = children.start(family(tmp_path, child=IGNORE))
    eventually(lambda: is_up(child))
    started_s = time.monotonic()
    children.close()
    assert group_members(child.pid) == []
    assert time.monotonic() - started_s < 5


def test_descendants_of_a_dead_child_are_ended_too(tmp_path):
    """An API server that crashed leaves its engine core behind; closing finds it."""
    with Children() as children:
        child = children.start(family(tmp_path))
        eventually(lambda: is_up(child))
        os.kill(child.pid, signal.SIGKILL)
        eventually(lambda: child.exit_code() is not None)
        assert len(group_members(child.pid)) == 1
    assert group_members(child.pid) == []


def test_a_dead_child_is_reported_with_its_log_and_a_fix(tmp_path):
    """The message carries the name, the exit code, the last lines and what to do."""
    with Children() as children:
        child = children.start(
            spec(tmp_path, "print('x' * 9); raise SystemExit(\"No module named 'vllm'\")", "prefill-0")
        )
        eventually(lambda: child.exit_code() is not None)
        with pytest.raises(ChildDiedError) as caught:
            child.raise_if_dead()
    message = str(caught.value)
    assert "prefill-0 ended with exit code 1" in message
    assert "xxxxxxxxx\nNo module named 'vllm'" in message
    assert "bidikv[cpu]" in message


def test_a_restarted_child_shows_its_own_log_only(tmp_path):
    """The log file keeps both lives; the tail is of the last."""
    with Children() as children:
        first = children.start(spec(tmp_path, "print('first life')"))
        eventually(lambda: first.exit_code() is not None)
        second = children.start(spec(tmp_path, "print('second life')"))
        eventually(lambda: second.exit_code() is not None)
        assert second.log_tail() == "second life"
        assert second.spec.log_path.read_text() == "first life\nsecond life\n"


def test_closing_twice_is_harmless(tmp_path):
    """The second time there is nothing left to end."""
    children = Children()
    child = children.start(family(tmp_path))
    children.close()
    children.close()
    assert group_members(child.pid) == []


def test_a_killed_launcher_leaves_nothing_behind(tmp_path):
    """The guardian notices the launcher's end and ends its children."""
    program = f"""
        import os, sys, time
        from pathlib import Path
        from bidikv_server.launch.process import Children, ChildSpec
        spec = ChildSpec("engine", (sys.executable, "-c", {FAMILY.format(parent="", child="")!r}),
                         dict(os.environ), Path({str(tmp_path / "engine.log")!r}))
        children = Children()
        print(children.start(spec).pid, flush=True)
        time.sleep(600)
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        group = int(launcher.stdout.readline())
        eventually(lambda: len(group_members(group)) == 2)
        launcher.kill()
        launcher.wait(10)
    eventually(lambda: not group_members(group))


def test_groups_that_are_gone_already_are_no_error():
    """Ending is idempotent."""
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait(10)
    end_groups([process.pid], 1.0)


def test_an_interrupt_waits_until_the_child_is_in_the_books(tmp_path, monkeypatch):
    """Ctrl-C between a child's fork and its registration ends it too, like any other time."""
    real = subprocess.Popen

    def interrupted(*args, **kwargs):
        popen = real(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return popen

    # Where tests run in the background, SIGINT may be ignored from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Children() as children:
        monkeypatch.setattr(subprocess, "Popen", interrupted)
        spec = ChildSpec(
            "sleeper",
            (sys.executable, "-c", "import time; time.sleep(60)"),
            dict(os.environ),
            tmp_path / "log",
        )
        with pytest.raises(KeyboardInterrupt):
            children.start(spec)
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before)
        assert len(children.pids()) == 1
    assert children.pids() == []
