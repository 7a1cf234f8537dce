"""The team of a planner and its sub-agents: who knows what, and whose turns the calls are."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from bidikv.examples import fan_out
from bidikv.examples.source_tools import SourceTools
from bidikv.headers import TURN_HEADER, TurnHeader


@pytest.fixture
def steps(router, tmp_path):
    """Two sub-agents, sent out twice for two turns each."""
    (tmp_path / "a.py").write_text("import os\n")
    with router.client() as client:
        team = fan_out.Team(client, SourceTools(tmp_path), {"model": "m"})
        return list(fan_out.rounds(team, question="what?", thread="t", agents=2, rounds=2, turns=2))


def test_waves(steps):
    """The planner's turns stand alone, the sub-agents' are waves; each agent counts its own."""
    assert [[(turn.agent, turn.index) for turn in step] for step in steps] == [
        [("planner", 0)],
        [("helper-0", 0), ("helper-1", 0)],
        [("helper-0", 1), ("helper-1", 1)],
        [("planner", 1)],
        [("helper-0", 2), ("helper-1", 2)],
        [("helper-0", 3), ("helper-1", 3)],
        [("planner", 2)],
    ]
    assert [turn.tool_name for step in steps[1:3] for turn in step] == ["list_files"] * 2 + [None] * 2


def test_each_agent_has_its_conversation(steps, router):
    """Three ids; the sub-agents name the planner's as the one they were forked from."""
    names = {turn.agent: turn.session for step in steps for turn in step}
    assert len(set(names.values())) == 3
    assert set(router.sessions) == set(names.values())
    parents = {
        session: TurnHeader.parse(header).parent
        for session, header in zip(router.sessions, router.header(TURN_HEADER), strict=True)
    }
    assert parents == {
        names["planner"]: None,
        names["helper-0"]: names["planner"],
        names["helper-1"]: names["planner"],
    }


@pytest.mark.usefixtures("steps")
def test_histories_only_grow(router):
    """Every prompt of an agent starts with its last one, and a sub-agent's first with the planner's."""
    histories = defaultdict(list)
    for session, body in zip(router.sessions, router.bodies, strict=True):
        histories[session].append(body["messages"])
    for prompts in histories.values():
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
    planner = router.bodies[0]["messages"]
    assert all(body["messages"][: len(planner)] == planner for body in router.bodies)
    assert "helper-1: It is a router." in router.bodies[-1]["messages"][-1]["content"]


@pytest.mark.parametrize("wrong", [["--agents", "0"], ["--agents", "9"], ["--rounds", "0"]])
def test_bad_arguments(capsys, wrong):
    """A team that cannot be is refused by the argument's name."""
    with pytest.raises(SystemExit):
        fan_out.main(["--model", "m", *wrong])
    assert wrong[0] in capsys.readouterr().err
