"""CrewAI on the wire: its real LLM and crew, and a router on loopback. Needs a venv of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("crewai", reason="needs crewai, which fits no engine's environment")

import crewai

import bidikv
from bidikv.examples import crewai_crew
from bidikv.headers import READBACK_HEADER
from bidikv.integrations.crewai import BidiKVInterceptor
from bidikv.testing import FakeRouter

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A router in memory; the framework keeps its files to itself."""
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    return FakeRouter("I now can give a great answer\nFinal Answer: It is sunny.")


def llm(base_url, interceptor):
    return crewai.LLM(
        model="openai/m", custom_openai=True, base_url=base_url, api_key="k", interceptor=interceptor
    )


def test_the_calls_of_an_llm(fake):
    """One id and a report for each turn, from any thread; the second turn is a hit."""
    conversation = bidikv.conversation("crew")
    with fake.serve() as base_url:
        model = llm(base_url, BidiKVInterceptor(conversation))
        messages = [{"role": "user", "content": "Oslo? " * 40}]
        answer = model.call(messages)
        model.call(
            [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"}]
        )
    assert fake.sessions == [conversation.id] * 2
    assert [turn.reason for turn in conversation.turns] == ["new_conversation", "hit"]
    assert [request.turn.index for request in fake.requests] == [0, 1]


def test_a_crew(fake):
    """Each agent's calls are its own conversation, a child of the crew's."""
    crew = bidikv.conversation("crew")
    with fake.serve() as base_url:
        members = [
            crewai.Agent(
                role=role,
                goal="Look it up",
                backstory="Careful.",
                llm=llm(base_url, BidiKVInterceptor(crew.child(role))),
            )
            for role in ("researcher", "writer")
        ]
        tasks = [
            crewai.Task(description="Oslo?", expected_output="weather", agent=member, async_execution=first)
            for member, first in zip(members, (True, False), strict=True)
        ]
        crewai.Crew(agents=members, tasks=tasks).kickoff()
    assert set(fake.sessions) == {crew.child("researcher").id, crew.child("writer").id}
    assert {request.turn.parent for request in fake.requests} == {crew.id}


def test_the_current_conversation(fake):
    """Without one of its own, the interceptor takes the one that is current; and none is none."""
    with fake.serve() as base_url:
        model = llm(base_url, BidiKVInterceptor(readback=False))
        model.call("hi")
        with bidikv.conversation("c") as conversation:
            model.call("hi")
    assert fake.sessions == [None, conversation.id]
    assert [request.headers[READBACK_HEADER] for request in fake.requests] == ["off"] * 2


def test_the_example(fake, capsys):
    """Its agent's calls are one conversation, and each turn is told."""
    with fake.serve() as base_url:
        assert crewai_crew.main(["--base-url", base_url, "--model", "m"]) == 0
    assert len(set(fake.sessions)) == 1
    assert "[turn 1] hit" in capsys.readouterr().out
