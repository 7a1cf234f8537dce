"""`bidikv verify` against the real cluster, and a decode engine that comes back as another one."""

from bidikv_server.verify import run_verify
from bidikv_server.verify.options import VerifyOptions

from .conftest import after, opening
from .test_turns import QUESTIONS, same_as_cold


def test_random_conversations_are_right(cluster, capsys):
    """Appends, edits, rewinds, forks, retries, tool calls and pauses: every answer is the cold run's."""
    engines = (*cluster.prefill_urls, *cluster.decode_urls)
    options = VerifyOptions(base_url=cluster.base_url, engines=engines, turns=30, seed=11)
    assert run_verify(options) == 0, capsys.readouterr().out
    assert "mismatches 0" in capsys.readouterr().out


def test_a_decode_engine_that_was_restarted(player, cluster):
    """Killed and started again on the same port: the history is computed anew, right, and reused from there on."""
    messages = opening()
    answer = player.turn(messages)
    cluster.kill("decode-0")
    cluster.restart("decode-0")
    messages = after(messages, answer, QUESTIONS[0])
    changed = same_as_cold(player, messages, player.turn(messages))
    assert changed.reuse.reason == "decode_changed"
    messages = after(messages, changed, QUESTIONS[1])
    assert same_as_cold(player, messages, player.turn(messages)).reuse.reason == "hit"
