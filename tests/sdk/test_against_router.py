"""Both halves together: the clients and the example agents, the real router, and engines that are not real."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import bidikv
from bidikv.examples import langgraph_agent, openai_loop
from bidikv.examples.source_tools import SourceTools
from bidikv.integrations.langgraph import BidiKVChat

pytest.importorskip("uvloop", reason="needs the router's libraries")
sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

from fake_engine import FakeEngine, serving

from bidikv_server.router.app import create_app
from bidikv_server.router.settings import RouterSettings


def through_router(use):
    """Call `use(base_url)` in a thread while a router and its two engines run; returns its result and the engines."""

    async def run():
        prefill, decode = FakeEngine("p"), FakeEngine("d")
        decode.publish_index("d", "10.0.0.1:7000")
        async with serving(prefill, decode) as (prefill_url, decode_url):
            settings = RouterSettings(prefill=(prefill_url,), decode=(decode_url,))
            async with serving(create_app(settings), lifespan="on") as (url,):
                return await asyncio.to_thread(use, f"{url}/v1"), prefill, decode

    return asyncio.run(run())


def ask_twice(client, **options):
    """Two turns of one chat; their reports."""
    messages = [{"role": "user", "content": "hi"}]
    reports = []
    for _ in range(2):
        response = client.chat.completions.create(model="m", messages=messages, **options)
        if options.get("stream"):
            list(response)
        reports.append(bidikv.turn_of(response))
        messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "and?"}]
    client.close()
    return reports


@pytest.mark.parametrize("stream", [False, True])
def test_second_turn_reuses(stream):
    """The router follows a named conversation, and its account comes back."""

    def use(base_url):
        with bidikv.conversation("a"):
            return ask_twice(bidikv.OpenAI(base_url=base_url, api_key="k"), stream=stream)

    (first, second), prefill, _ = through_router(use)
    assert first.reason == "new_conversation"
    assert (second.reason, second.remote_tokens, second.local_tokens, second.computed_tokens) == (
        "hit",
        64,
        16,
        20,
    )
    assert [seen.ours["sources"] for seen in prefill.prefilled] == [[], ["10.0.0.1:7000"]]
    assert (second.ttft_s is not None) is stream


def test_readback_off():
    """A client without readback asks for nothing and has nothing retained."""

    def use(base_url):
        return ask_twice(bidikv.OpenAI(base_url=base_url, api_key="k", conversation="a", readback=False))

    reports, prefill, decode = through_router(use)
    assert [report.reason for report in reports] == ["readback_off"] * 2
    assert [seen.ours["sources"] for seen in prefill.prefilled] == [[], []]
    assert {seen.ours.get("retain_s", 0) for seen in decode.answered} == {0}


def test_langgraph_agent(tmp_path):
    """An agent whose engine ignores `tool_choice` still runs its turns, as one conversation."""
    (tmp_path / "a.py").write_text("import os\n")

    def use(base_url):
        chat = BidiKVChat(model="m", base_url=base_url, temperature=0)
        agent = langgraph_agent.build_agent(chat, SourceTools(tmp_path))
        records = langgraph_agent.run_agent(agent, thread_id="t", question="what?", turns=3)
        chat._sync().close()
        return records

    records, prefill, _ = through_router(use)
    assert [record.reason for record in records] == ["new_conversation", "hit", "hit"]
    assert [record.text for record in records] == ["Hello"] * 3
    assert len({seen.ours["conversation"] for seen in prefill.prefilled}) == 1


def test_openai_loop(tmp_path, capsys):
    """The plain loop's program prints a line of reuse for each turn."""
    (tmp_path / "a.py").write_text("import os\n")
    arguments = ["--model", "m", "--root", str(tmp_path), "--turns", "2"]
    code, _, _ = through_router(lambda base_url: openai_loop.main(["--base-url", base_url, *arguments]))
    assert code == 0
    assert "[turn 1] hit: prompt 100 = remote 64 + local 16 + computed 20" in capsys.readouterr().out


def test_async_client():
    """The asynchronous client speaks to the router alike."""

    async def talk(base_url):
        async with (
            bidikv.AsyncOpenAI(base_url=base_url, api_key="k") as client,
            client.conversation() as named,
        ):
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            return [chunk async for chunk in stream], named.turns

    (chunks, turns), _, _ = through_router(lambda base_url: asyncio.run(talk(base_url)))
    assert len(chunks) == 3
    assert turns[0].reason == "new_conversation"
    assert turns[0].ttft_s > 0


def test_explain_and_end():
    """The router explains a turn to its caller, takes a tool's wait, and forgets what is closed."""

    def use(base_url):
        with bidikv.OpenAI(base_url=base_url, api_key="k") as client:
            with client.conversation("a") as conversation:
                reports = ask_once(client), ask_once(client)
                with conversation.tool("look", expected_s=1):
                    pass
            explained = client.explain(conversation)
            with bidikv.OpenAI(base_url=base_url, api_key="another") as stranger:
                strange = stranger.explain(conversation)
            conversation.close()
            return reports, explained, strange, client.explain(conversation)

    (reports, explained, strange, after), _, _ = through_router(use)
    assert [report.drift.kind for report in reports] == ["start", "retry"]
    assert explained.reason == "hit"
    assert explained.advice.startswith("Everything that decode held")
    assert explained.placement == "home"
    assert strange.advice is None
    assert after.advice is None


def ask_once(client):
    """One turn; its report."""
    return bidikv.turn_of(
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    )
