"""The whole command against the real router: what it finds, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from bidikv_server.cli.app import app
from bidikv_server.verify.options import VerifyOptions
from bidikv_server.verify.run import Verification


def verify(cluster, *words, turns=30):
    return CliRunner().invoke(
        app,
        ["verify", "--base-url", f"{cluster.url}/v1", "--turns", str(turns), "--seed", "3", *words],
        env={"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"},
    )


def test_right_answers_end_with_0(cluster, tmp_path):
    """Every operation passes, the sums are shown, and the file holds the plan and every turn."""
    file = tmp_path / "verify.json"
    engines = [word for url in cluster.engine_urls for word in ("--engine", url)]
    result = verify(cluster, "--json", str(file), *engines, turns=80)
    assert result.exit_code == 0, result.output
    assert "80/80" in result.output
    assert "mismatches 0, near ties 0, hung 0, failed 0" in result.output
    assert "Reuse by reason" in result.output
    assert "Every answer is the cold run's." in result.output
    written = json.loads(file.read_text())
    assert (written["seed"], len(written["turns"]), len(written["plan"])) == (3, 80, 80)
    assert {turn["verdict"] for turn in written["turns"]} == {"same"}
    assert written["kv_cache_usage"] == dict.fromkeys(cluster.engine_urls, 0.0)
    ops = {turn["op"] for turn in written["turns"]}
    assert {"open", "append", "edit_user", "edit_answer", "rewind", "fork", "retry", "tool_call"} <= ops


def test_a_wrong_answer_ends_with_1(cluster):
    """With its token, what the conversation did, the seed, and the command that plays it again."""
    cluster.decode.wrong_after = 3
    result = verify(cluster)
    assert result.exit_code == 1, result.output
    assert "mismatch in conversation" in result.output
    assert "generated token 1 is" in result.output
    assert "turn 0 open session 0" in result.output
    assert "seed 3; again: bidikv verify --base-url" in result.output
    assert "--conversation" in result.output
    assert "NOT VERIFIED" in result.output
    assert "Traceback" not in result.output


def test_one_conversation_can_be_played_alone(cluster, tmp_path):
    """As the finding says."""
    file = tmp_path / "verify.json"
    assert verify(cluster, "--conversation", "2", "--json", str(file)).exit_code == 0
    assert {turn["conversation"] for turn in json.loads(file.read_text())["turns"]} == {2}


def test_a_near_tie_is_counted_and_ends_with_0(cluster):
    """Both alternatives almost equally likely: batching may flip them."""
    cluster.decode.wrong_after, cluster.decode.margin = 3, 0.01
    result = verify(cluster)
    assert result.exit_code == 0, result.output
    assert "mismatches 0, near ties " in result.output
    assert "near ties 0" not in result.output


@pytest.mark.parametrize(("margin", "exit_code"), [(3.0, 1), (0.01, 0)])
def test_texts_are_compared_where_engines_tell_no_ids(cluster, margin, exit_code):
    """And judged by their tokens' texts."""
    cluster.decode.with_ids, cluster.decode.wrong_after, cluster.decode.margin = False, 3, margin
    # A tool call's text is its arguments, which no token begins.
    cluster.decode.refuses = frozenset({"tools"})
    result = verify(cluster)
    assert "the engines return no token ids: texts are compared" in result.output
    assert result.exit_code == exit_code, result.output


def test_what_the_model_refuses_is_skipped_and_said(cluster):
    """Once, before the plan is made."""
    cluster.decode.refuses = frozenset({"tools", "/v1/completions"})
    result = verify(cluster)
    assert result.exit_code == 0, result.output
    assert "a named tool_choice: tool calls are left out" in result.output
    assert "the completions API: its turns are left out" in result.output
    assert not any(seen.path == "/v1/completions" for seen in cluster.decode.seen[5:])


def test_a_request_that_hangs_ends_with_1(cluster):
    """After its time is over; the rest of its conversation is left out."""
    cluster.decode.hang_after = 3
    result = verify(cluster, "--timeout", "1", "--conversation", "0")
    assert result.exit_code == 1, result.output
    assert "hung in conversation 0" in result.output
    assert "no complete answer within 1 s" in result.output
    assert "hung 1" in result.output


def test_a_stream_that_breaks_off_ends_with_1(cluster):
    """An error without an outage is a failure, and is shown."""

    class Cut(type(cluster.decode)):
        def _stream(self, body, messages, *, wrong):
            yield from list(super()._stream(body, messages, wrong=wrong))[: 1 if len(messages) > 2 else None]

    cluster.decode.__class__ = Cut
    result = verify(cluster)
    assert result.exit_code == 1, result.output
    assert "error_event" in result.output


def test_blocks_that_stay_in_use_are_a_failure(cluster):
    """An engine that has ended all requests holds none."""
    cluster.decode.usage = 0.25
    options = VerifyOptions(base_url=cluster.url, engines=cluster.engine_urls, turns=3)
    verification = Verification(options, cluster.url, cluster.engine_urls, empty_within_s=0.0)
    result = asyncio.run(verification.run())
    assert result.leaking == {cluster.engine_urls[1]: 0.25}
    assert not result.is_good


def test_a_router_without_a_model_is_wrong_use(cluster):
    """One message."""
    cluster.decode.served = ()
    result = verify(cluster)
    assert result.exit_code == 2
    assert "serves no model" in result.output


def test_nobody_at_the_address_is_wrong_use():
    """With the way out."""
    result = CliRunner().invoke(app, ["verify", "--base-url", "http://127.0.0.1:9"], env={"NO_COLOR": "1"})
    assert result.exit_code == 2
    assert "no bidikv router answers at http://127.0.0.1:9" in result.output
    assert "bidikv up" in result.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--chaos", "--base-url", "http://x"], "leave out --base-url"),
        (["--engine", "http://x"], "goes with --base-url"),
        (["--base-url", "http://x", "--decode", "2"], "for a cluster that this command starts"),
        (["--turns", "0"], "turns"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_use(words, reason):
    """Before anything is started."""
    result = CliRunner().invoke(
        app, ["verify", *words], env={"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"}
    )
    assert result.exit_code == 2
    assert reason in result.output
