"""The connector benchmark's table and file."""

import json

import pytest

from comparison.figures import Ratio
from comparison.idle import Idle
from comparison.lookup_inside import Inside
from comparison.pressure import Pressure
from comparison.report import lines
from comparison.results import Result, Side
from comparison.streamed import Reuse
from comparison.throughput import Throughput
from comparison.wrong_answers import Judged


def judged(*, wrong):
    return Judged("edited", 1.0, wrong, wrong, "a", "b", "c")


def result():
    stock = Side(
        answers=[judged(wrong=True), judged(wrong=False)],
        streaming=[Reuse(streamed=True, turns=4, pulled=0, handles=0)],
        idle=Idle(20, 0.02, 0.42, 3, 400, 45),
        pressure=Pressure(150, 90, 60.0, 4, 399, 400, 0),
    )
    ours = Side(
        answers=[judged(wrong=False), judged(wrong=False)],
        streaming=[Reuse(streamed=True, turns=4, pulled=4, handles=0)],
        idle=Idle(20, 0.02, 0.02, 3, 400, 0),
        pressure=Pressure(150, 150, 60.0, 0, 0, 400, 0),
    )
    even = Ratio(1.0, 0.99, 1.01)
    load = Throughput(400, [], even, even, even, 0, 0.001)
    inside = Inside(2048, 7, 2048, 12.0, 9.0, 6.0, 6.5, 0.5, 3.0, 2.0, 8.0)
    return Result("0", "0.32", "m", 2, ("--x",), stock=stock, ours=ours, throughput=load, lookup=[inside])


def row(table, name):
    return next(
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith(f"| {name}")
    )


def test_the_table_has_both_sides():
    """Stock, ours and the verdict stand in one row."""
    table = list(lines(result()))
    assert row(table, "wrong answers to changed histories")[1:] == ["1 of 2", "0 of 2", "yes"]
    assert row(table, "warm turns with readback, streamed")[1:] == ["0 of 4", "4 of 4", "yes"]
    assert row(table, "idle decode engine")[1:] == ["2.0%, 42.0%", "2.0%, 2.0%", "yes"]
    assert row(table, "blocks unavailable")[1:] == ["45 of 400 (3 turns)", "0 of 400 (3 turns)", "yes"]


def test_a_missed_target_is_said():
    """Lookup and validation together are over the limit of 2,048 blocks."""
    assert row(list(lines(result())), "2048")[-1] == "NO"


def test_parts_that_were_left_out_have_no_row():
    """An empty result is an empty table."""
    table = list(lines(Result("0", "0.32", "m", 2, ())))
    assert not [line for line in table if "answers" in line or "blocks unavailable" in line]


@pytest.mark.parametrize("wrong", [True, False])
def test_only_our_wrong_answers_count(wrong):
    """The exit code is about us; stock is expected to be wrong."""
    measured = result()
    measured.ours.answers.append(judged(wrong=wrong))
    assert measured.right() is not wrong


def test_everything_is_written(tmp_path):
    """The file holds what the table sums up."""
    path = tmp_path / "deep" / "result.json"
    result().write(path)
    written = json.loads(path.read_text())
    assert written["stock"]["idle"]["unavailable_blocks"] == 45
    assert written["throughput"]["per_token"]["high"] == 1.01
