"""The product as its users run it, on the real cluster: the agents, the demo's conversation, an idle decode engine."""

import os
import threading
import time
from pathlib import Path

import pytest

import bidikv_server
from bidikv.examples import langgraph_agent, openai_loop
from bidikv.examples.source_tools import SourceTools
from bidikv_server.demo.play import Stage, pair
from bidikv_server.demo.workload import Workload
from bidikv_server.launch import readiness

from .conftest import sample

ROOT = Path(bidikv_server.__file__).parent
OBSERVE_S = 4.0


@pytest.mark.parametrize("agent", [langgraph_agent, openai_loop])
def test_example_agents_run_their_turns_and_reuse(cluster, agent, capsys):
    """Every turn streams, calls a real tool, and reuses the turns before it."""
    arguments = [
        "--base-url",
        cluster.base_url,
        "--model",
        cluster.model_name,
        "--root",
        str(ROOT),
        "--turns",
        "4",
    ]
    # A question of its own: both agents put the same tools first, and would find each other's prompt.
    question = f"What would {agent.__name__} find here?"
    assert agent.main([*arguments, "--question", question]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[turn ")]
    assert len(lines) == 4
    assert all("hit" in line for line in lines[1:])


@pytest.fixture
def sources(tmp_path):
    """A source tree that no commit changes: what the model says depends on it."""
    for name in ("lighthouse", "harbour", "ships"):
        (tmp_path / f"{name}.py").write_text(f'"""All about the {name}."""\n' + f"{name.upper()} = 1\n" * 20)
    return tmp_path


def test_the_demos_conversation_is_identical_with_and_without_readback(cluster, sources):
    """Tool calls, free text and follow-up questions through LangGraph give the same answers both ways."""
    workload = Workload(questions=2, turns_per_question=3, max_tokens=40)
    stage = Stage(cluster.base_url, cluster.model_name, SourceTools(sources, max_chars=300), workload)
    questions = ["Look around, then say what this is for.", *workload.follow_ups("def main() -> int:\n" * 40)]
    runs = [stage.play(questions, readback=readback, on_turn=lambda _: None) for readback in (True, False)]
    turns = pair(0, *runs)
    assert len(turns) == 6
    assert all(turn.identical for turn in turns), [turn.answer for turn in turns if not turn.identical]
    assert all(turn.reason.startswith("hit") for turn in turns[1:])
    assert sum(turn.reused_generated_tokens for turn in turns) > 0


def test_a_decode_engine_that_retains_stays_idle(player, cluster):
    """Soft retention needs no step of the engine: stock retention keeps it busy at two fifths of a core."""
    player.turn([{"role": "user", "content": "Count to ten. " * 40}])
    started_s, before = time.monotonic(), cpu_seconds(cluster, "decode-0")
    threading.Event().wait(OBSERVE_S)
    busy = (cpu_seconds(cluster, "decode-0") - before) / (time.monotonic() - started_s)
    assert busy < 0.25


def test_engines_publish_what_became_of_reuse(player, cluster):
    """The connector's metrics stand among vLLM's own, on either engine."""
    story = {"role": "user", "content": "Tell me about rivers and the sea. " * 30}
    answer = player.turn([story])
    player.turn([story, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Go on."}])
    prefill, decode = (
        readiness.fetch(f"{url[0]}/metrics") for url in (cluster.prefill_urls, cluster.decode_urls)
    )
    assert sample(prefill, "bidikv:readbacks_total", 'reason="hit"') >= 1
    assert sample(prefill, "bidikv:prompt_tokens_total", 'source="remote"') >= 128
    assert sample(prefill, "bidikv:readback_blocks_total", 'result="verified"') >= 4
    assert sample(prefill, "bidikv:lookup_seconds_count") >= 1
    assert sample(decode, "bidikv:retained_turns_total", 'kind="retained"') >= 1
    assert sample(decode, "bidikv:index_requests_total", 'kind="lookup"') >= 1
    assert sample(decode, "bidikv:retained_tokens", 'class="soft"') >= 128


def cpu_seconds(cluster, name):
    """CPU time of a member's process group so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == cluster.group_of(name):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
