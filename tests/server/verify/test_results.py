"""Sums over turns, and what led to one."""

from __future__ import annotations

from bidikv_server.verify.judge import Verdict
from bidikv_server.verify.options import VerifyOptions
from bidikv_server.verify.plan import AnswerOf, Features, Op, Script, Text, Turn
from bidikv_server.verify.report import finding_lines, turn_line
from bidikv_server.verify.results import Result, TurnRecord, by_reason, plan_rows
from bidikv_server.verify.write import write_plan


def record(turn=0, verdict=Verdict.SAME, reason="hit", remote=32, **more):
    return TurnRecord(
        conversation=4,
        turn=turn,
        op="append",
        branch=0,
        endpoint="chat",
        stream=True,
        verdict=verdict,
        seconds=0.5,
        reason=reason,
        prompt_tokens=50,
        remote_tokens=remote,
        local_tokens=0,
        computed_tokens=50 - remote,
        **more,
    )


def result(*turns, usage=None):
    return Result(
        bidikv="1",
        command="c",
        seed=1,
        base_url="u",
        model="m",
        features={},
        planned_turns=len(turns),
        seconds=1.0,
        turns=list(turns),
        outages=[],
        kv_cache_usage=usage or {},
        plan=[],
    )


def test_turns_are_summed_by_reason():
    """Most frequent first; a turn without an account is unknown."""
    rows = by_reason([record(), record(), record(reason="diverged", remote=0), record(reason=None)])
    assert rows == [("hit", 2, 64, 0, 36), ("diverged", 1, 0, 0, 50), ("unknown", 1, 32, 0, 18)]


def test_what_makes_a_run_good():
    """Near ties and engines that tell nothing do not spoil it; everything else does, and so does no turn at all."""
    assert result(record(), record(verdict=Verdict.NEAR_TIE), usage={"a": 0.0, "b": None}).is_good
    assert not result().is_good
    assert not result(record(), usage={"a": 0.01}).is_good
    for verdict in (Verdict.MISMATCH, Verdict.HUNG, Verdict.FAILED):
        assert not result(record(), record(verdict=verdict)).is_good


def test_a_finding_tells_its_history_and_how_to_see_it_again():
    """Without the turns of other conversations and without those that came later."""
    first = Turn(0, Op.OPEN, 0, None, "chat", (Text("user", "Tell me about the sea please."),), 8)
    second = Turn(1, Op.APPEND, 0, None, "chat", (*first.parts, AnswerOf(0), Text("user", "And?")), 8)
    third = Turn(2, Op.REGENERATE, 0, None, "chat", second.parts, 8)
    wrong = record(1, Verdict.MISMATCH, detail="generated token 3 is 7, cold it is 8", warm="x", cold="y")
    lines = finding_lines(
        Script(4, [first, second, third]), [record(), wrong], VerifyOptions(seed=9, turns=70)
    )
    text = "\n".join(lines)
    assert "mismatch in conversation 4, turn 1: generated token 3 is 7, cold it is 8" in text
    assert "turn 0 open" in text
    assert "answer[0]" in text
    assert "regenerate" not in text
    assert "bidikv verify --turns 70 --seed 9 --concurrency 2 --conversation 4" in text


def test_a_turns_line_says_what_was_reused():
    """And whether the answer was right."""
    line = turn_line(3, 20, record(retries=2))
    for word in ("3/20", "append", "hit", "50 prompt", "32 from decode", "2 retries", "same"):
        assert word in line


def test_the_plan_is_written_with_its_texts():
    """So that a finding can be played by other means."""
    scripts = write_plan(1, 10, Features(4096))
    rows = plan_rows(scripts)
    assert len(rows) == 10
    assert all(part["kind"] in {"Text", "AnswerOf", "ToolResult"} for row in rows for part in row["parts"])
