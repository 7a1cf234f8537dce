"""The placement benchmark's figures, from turns that were played."""

import sys

import pytest

import placement


def played(policy, turn, ttft_s, tokens=(1, 2), brings="question"):
    mode = "alone" if policy == "decode" else policy
    return placement.Played(policy, "short", turn, brings, 100, ttft_s, mode, "fixed", "hit", tuple(tokens))


def group(turn, ttft_s, **tokens):
    return [played(name, turn, ttft_s, tokens.get(name, (1, 2))) for name in placement.POLICIES]


def test_figures_are_of_turns_that_have_a_history():
    """First turns do not count; quantiles are of turns that were measured."""
    turns = [turn for number in range(11) for turn in group(number, 9.0 if number == 0 else number / 10)]
    found = placement.summary(turns)["readback"]
    assert (found["turns"], found["ttft_p50_s"], found["ttft_p90_s"]) == (10, 0.6, 1.0)
    assert found["ttft_p50_s_by"]["short, question"] == 0.6
    assert found["ttft_p50_s_by"]["long, result"] is None
    assert found["choices"] == {"readback fixed hit": 10}


def test_answers_are_held_to_the_cold_run():
    """Whoever differs from what was computed without any reuse is named."""
    turns = [*group(0, 1.0), *group(1, 1.0, cheapest=(1, 3)), *group(2, 1.0, readback=())]
    wrong = placement.differing(turns, len(placement.POLICIES))
    assert [(turn.policy, turn.turn) for turn in wrong] == [("cheapest", 1), ("readback", 2)]


def test_every_policy_can_be_loaded():
    """The settings name policies that the router knows or can import."""
    from bidikv_server.router.policies import load_policies  # noqa: PLC0415
    from bidikv_server.router.settings import RouterSettings  # noqa: PLC0415

    for setting in placement.POLICIES.values():
        assert callable(
            load_policies(
                RouterSettings(prefill=("http://p:1",), decode=("http://d:1",), mode_policy=setting)
            ).mode
        )


@pytest.mark.parametrize("arguments", [["--conversations", "0"], ["--turns", "1"]])
def test_bounds(monkeypatch, capsys, arguments):
    """Too little to compare is said before engines start."""
    monkeypatch.setattr(sys, "argv", ["placement.py", *arguments])
    with pytest.raises(SystemExit):
        placement.main()
    assert "--conversations needs 1 at least" in capsys.readouterr().err
