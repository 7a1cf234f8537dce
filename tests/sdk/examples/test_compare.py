"""The comparison: two runs in step, paired turn by turn, as a table and as a picture."""

from __future__ import annotations

import sys

import pytest

from bidikv.examples.compare import Comparison, lockstep, table, write_plot
from bidikv.examples.turns import TurnRecord


def record(index, ttft_s, *, text="a", agent="", reason="hit"):
    """A turn of 100 prompt tokens for each that was before it."""
    prompt = 100 * (index + 1)
    return TurnRecord(index, text, None, None, ttft_s, "s", reason, prompt, prompt - 20, 0, 20, agent)


def test_the_leader_changes_with_every_step():
    """Neither run is always the first, and each goes on to its own end."""
    played = []

    def run(name, steps):
        for number in range(steps):
            played.append(f"{name}{number}")
            yield [record(number, 1.0), record(number, 2.0)]

    on, off = lockstep(run("on", 3), run("off", 2))
    assert played == ["on0", "off0", "off1", "on1", "on2"]
    assert ([turn.index for turn in on], [turn.index for turn in off]) == ([0, 0, 1, 1, 2, 2], [0, 0, 1, 1])


def test_turns_are_paired_within_their_agents():
    """Whatever the order in which agents that run at once were done."""
    on = [record(0, 1.0, agent="a"), record(0, 1.0, agent="b"), record(1, 0.5, agent="a")]
    off = [record(0, 1.0, agent="b"), record(0, 2.0, agent="a"), record(1, 2.0, agent="a", text="other")]
    comparison = Comparison.of(on, off)
    assert [(pair.turn, pair.on.agent, pair.off.agent, pair.ratio) for pair in comparison.pairs] == [
        (0, "a", "a", 2.0),
        (0, "b", "b", 1.0),
        (1, "a", "a", 4.0),
    ]
    assert [pair.identical for pair in comparison.pairs] == [True, True, False]
    assert [pair.on.agent for pair in comparison.warm] == ["a"]
    assert not comparison.answers_identical


def test_the_table():
    """The demo's columns, the medians of the warm turns, and whether the answers agree."""
    on = [record(0, 1.0, reason="new_conversation"), record(1, 0.25), record(2, 0.5)]
    off = [record(0, 1.0), record(1, 2.0), record(2, 2.0)]
    lines = table(Comparison.of(on, off)).splitlines()
    assert lines[0] == "turn  prompt  from decode  local  computed  TTFT on  TTFT off  ratio  reuse"
    assert lines[3] == "   1     200          180      0        20   0.25 s    2.00 s   8.0x  hit"
    assert lines[-2] == (
        "warm turns wait 0.38 s with readback, 2.00 s without: 6.0 times less (smallest 4.0); sooner in 2 of 2"
    )
    assert lines[-1] == "answers with and without readback: identical"


def test_what_is_missing_is_said():
    """A time or a turn that is not there is no number, and other answers stand out."""
    on = [record(0, 1.0, agent="a"), record(1, None, agent="a", text="x"), record(2, 1.0, agent="a")]
    off = [record(0, 1.0, agent="a"), record(1, 1.0, agent="a")]
    shown = table(Comparison.of(on, off))
    assert "agent  turn" in shown
    assert "       ?    1.00 s      ?  hit (OTHER ANSWER)" in shown
    assert "1 turns were taken in one of the runs only" in shown
    assert shown.endswith("NOT IDENTICAL")
    assert "warm turns wait" not in shown


def test_the_picture(tmp_path):
    """A PNG, in a folder that is made for it."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "ttft.png"
    write_plot(path, Comparison.of([record(0, 1.0), record(1, 0.2)], [record(0, 1.0), record(1, 1.0)]))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_without_its_library(tmp_path, monkeypatch):
    """It is the program that says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError):
        write_plot(tmp_path / "ttft.png", Comparison.of([], []))
