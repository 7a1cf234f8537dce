"""The planner: whatever the seed, what it writes can be played, and is the same every time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_server.verify.plan import Features, Op, problems
from bidikv_server.verify.write import write_plan

FEATURES = st.builds(
    Features,
    max_model_len=st.integers(256, 40_000),
    tools=st.booleans(),
    system=st.booleans(),
    completions=st.booleans(),
    token_ids=st.booleans(),
)
# How long an example takes says little on a shared machine.
EXAMPLES = settings(deadline=None, max_examples=150)


@EXAMPLES
@given(seed=st.integers(), turns=st.integers(1, 60), features=FEATURES)
def test_every_operation_is_applicable(seed, turns, features):
    """Prompts fit, end with a question, and repeat only answers that came before; no turn is missing."""
    scripts = write_plan(seed, turns, features)
    assert [problem for script in scripts for problem in problems(script, features)] == []
    assert sum(len(script.turns) for script in scripts) == turns
    assert [script.number for script in scripts] == list(range(len(scripts)))


@EXAMPLES
@given(seed=st.integers(), turns=st.integers(1, 40), more=st.integers(0, 40), features=FEATURES)
def test_the_seed_decides_everything(seed, turns, more, features):
    """The same plan again, and a longer one begins with it."""
    plan = [turn for script in write_plan(seed, turns, features) for turn in script.turns]
    longer = [turn for script in write_plan(seed, turns + more, features) for turn in script.turns]
    assert longer[:turns] == plan


@EXAMPLES
@given(seed=st.integers(), features=FEATURES)
def test_what_the_model_cannot_do_is_left_out(seed, features):
    """No tools, system messages or completions unless they work."""
    turns = [turn for script in write_plan(seed, 40, features) for turn in script.turns]
    assert features.tools or not any(turn.lists_tool or turn.calls_tool for turn in turns)
    assert features.completions or all(turn.endpoint == "chat" for turn in turns)
    roles = {getattr(part, "role", None) for turn in turns for part in turn.parts}
    assert features.system or "system" not in roles


@EXAMPLES
@given(seed=st.integers())
def test_sessions_grow_by_forks_alone(seed):
    """A branch belongs to its conversation, and a fork names the branch that it came from."""
    for script in write_plan(seed, 60, Features(8192)):
        known = {0}
        for turn in script.turns:
            assert turn.branch in known or turn.op is Op.FORK
            assert (turn.parent is None) == (turn.branch == 0)
            known.add(turn.branch)


def test_all_operations_come_up():
    """Within a few hundred turns each is played often enough to find something."""
    turns = [turn for script in write_plan(7, 400, Features(8192)) for turn in script.turns]
    counts = Counter(turn.op for turn in turns)
    assert set(counts) == set(Op)
    assert min(counts.values()) >= 5
    assert {turn.stream for turn in turns} == {True, False}
    assert {turn.endpoint for turn in turns} == {"chat", "completions"}
    assert any(turn.cancel_first and turn.stream for turn in turns)


def test_different_seeds_differ():
    """Or there would be little point in a seed."""
    assert write_plan(1, 5, Features(8192)) != write_plan(2, 5, Features(8192))
