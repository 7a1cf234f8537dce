"""The example agents: both run their turns as one conversation whose prompts only grow."""

from __future__ import annotations

import itertools
import sys

import pytest

import bidikv
from bidikv.examples import langgraph_agent, openai_loop
from bidikv.examples.source_tools import SourceTools
from bidikv.integrations.langgraph import BidiKVChat


@pytest.fixture
def toolbox(tmp_path):
    """Tools over a directory of one file."""
    (tmp_path / "a.py").write_text("import os\n")
    return SourceTools(tmp_path)


def run_langgraph(router, toolbox, **options):
    chat = BidiKVChat(model="m", client=router.client(), temperature=0)
    agent = langgraph_agent.build_agent(chat, toolbox)
    return langgraph_agent.run_agent(agent, thread_id="t", question="what?", turns=4, **options)


def run_plain(router, toolbox, **options):
    return openai_loop.run_loop(router.client(), toolbox, model="m", question="what?", turns=4, **options)


@pytest.mark.parametrize("run", [run_langgraph, run_plain])
def test_turns(router, toolbox, run):
    """Three prescribed tool calls, then an answer; each told with its reuse and its time to first token."""
    told, tokens = [], []
    records = run(router, toolbox, on_turn=told.append, on_token=tokens.append)
    assert records == told
    assert [record.tool_name for record in records] == ["list_files", "read_lines", "search", None]
    assert records[1].tool_args == '{ "path" :"a.py","start" :1}'
    assert records[-1].text == router.text
    assert "".join(tokens) == "".join(record.tool_args or record.text for record in records)
    assert [record.index for record in records] == [0, 1, 2, 3]
    assert [record.reason for record in records] == ["new_conversation", "hit", "hit", "hit"]
    assert (records[3].prompt_tokens, records[3].remote_tokens, records[3].local_tokens) == (100, 64, 16)
    assert all(record.ttft_s > 0 for record in records)
    assert {record.session for record in records} == set(router.sessions)
    assert len(set(router.sessions)) == 1
    assert "hit: prompt 100 = remote 64 + local 16 + computed 20 tokens" in records[3].line()


@pytest.mark.parametrize("run", [run_langgraph, run_plain])
def test_prompts_only_grow(router, toolbox, run):
    """Every prompt starts with the one before it, tools included."""
    run(router, toolbox)
    bodies = router.bodies
    for before, after in itertools.pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]
    assert [body["tool_choice"] for body in bodies][-1] == "none"
    assert {body["temperature"] for body in bodies} == {0}


def test_both_send_the_same(router, toolbox):
    """With and without the framework, the engine reads the same prompts."""
    run_langgraph(router, toolbox)
    router._calls = 0
    run_plain(router, toolbox)
    messages = [body["messages"] for body in router.bodies]
    assert messages[:4] == messages[4:]


def test_second_question(router, toolbox):
    """A thread goes on with the next question, which gets its own turns."""
    chat = BidiKVChat(model="m", client=router.client())
    agent = langgraph_agent.build_agent(chat, toolbox, ["search"])
    for question in ("one", "two"):
        records = langgraph_agent.run_agent(agent, thread_id="t", question=question, turns=2)
        assert [record.tool_name for record in records] == ["search", None]
    assert len(set(router.sessions)) == 1


def test_malformed_call_goes_on(router, toolbox):
    """A call that is cut short is answered with an error, and the loop runs its turns."""
    router.raw_args = '{"path": '
    for run in (run_langgraph, run_plain):
        records = run(router, toolbox)
        assert [record.tool_args for record in records] == [router.raw_args] * 3 + [None]
        assert router.bodies[-1]["messages"][-1]["content"].startswith("error: ")


@pytest.mark.parametrize("module", [langgraph_agent, openai_loop])
def test_command_line(served, tmp_path, capsys, module):
    """The programs print the stream and a line of reuse for each turn."""
    (tmp_path / "a.py").write_text("import os\n")
    code = module.main(["--base-url", served, "--model", "m", "--root", str(tmp_path), "--turns", "2"])
    printed = capsys.readouterr().out
    assert code == 0
    assert "It is a router." in printed
    assert "[turn 1] hit: prompt 100" in printed


@pytest.mark.parametrize("module", [langgraph_agent, openai_loop])
def test_no_router(tmp_path, capsys, monkeypatch, module):
    """Without a router the programs say so and fail."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0)
    (tmp_path / "a.py").write_text("import os\n")
    arguments = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--root", str(tmp_path)]
    assert module.main(arguments) == 2
    assert "cannot reach the router at http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_bad_arguments(capsys, tmp_path):
    """Arguments that cannot work are refused before anything runs."""
    for wrong in (["--turns", "0"], ["--root", str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            openai_loop.main(["--model", "m", *wrong])
    assert "--root" in capsys.readouterr().err
    assert "bidikv" in sys.modules
    assert bidikv.__version__
