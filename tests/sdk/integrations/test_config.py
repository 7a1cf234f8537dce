"""Which conversation a LangChain config stands for."""

from __future__ import annotations

import asyncio
import uuid

import pytest

import bidikv
from bidikv.integrations import _threads
from bidikv.integrations._config import call_config, node_path, place_of, scope
from bidikv.integrations._threads import (
    Threads,
    aclose_thread,
    ambient_conversation,
    call_conversation,
    close_thread,
    thread_report,
    waiting_conversation,
)
from bidikv.testing import FakeRouter

ASK, TELL = [{"role": "user", "content": "ask"}], [{"role": "user", "content": "tell"}]


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Threads that no other test has used."""
    monkeypatch.setattr(_threads, "_threads", Threads())
    return _threads._threads


def config(thread_id, path="", **metadata):
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": path}, "metadata": metadata}


def task(node):
    return f"{node}:{uuid.uuid4()}"


def conversation_of(of, messages=(), **options):
    with scope(of):
        return ambient_conversation(messages, **options)


def test_node_path_loses_task_ids():
    """Task ids change with every step, the path of nodes does not."""
    assert node_path(f"{task('team')}|{task('planner')}") == "team|planner"
    assert node_path("model") == "model"
    assert node_path(None) == ""


def test_same_node_at_another_step():
    """A node's turns are one conversation, whatever has been said meanwhile."""
    first, second = (conversation_of(config("t", task("model")), messages) for messages in (ASK, TELL))
    assert first is second
    assert first.agent == "model"


def test_threads_nodes_and_agents_differ():
    """Threads are apart, and so are the nodes and the agents within one."""
    places = [config("t", "a"), config("u", "a"), config("t", "b"), config("t", "a|b"), config("t", "")]
    places += [config("t", "a", lc_agent_name=name) for name in ("planner", "writer")]
    assert len({conversation_of(place).id for place in places}) == len(places)


def test_the_same_in_every_process(threads):
    """Ids hold no memory of this process, and a secret makes them others."""
    place = config("t", f"{task('tools')}|{task('model')}", lc_agent_name="planner")
    before = conversation_of(place, ASK).id
    threads._conversations.clear()
    assert conversation_of(place, ASK).id == before
    assert conversation_of(place, ASK, secret=b"s").id != before


def test_agents_that_run_at_once():
    """Runs of one sub-agent, and sent nodes, are told apart by how their histories begin; another run of one is that one."""

    def sub():
        return config("t", f"{task('tools')}|{task('model')}", lc_agent_name="planner")

    sent = config("t", task("worker"), langgraph_path=("__pregel_push", 0, False))
    ids = [conversation_of(of, messages).id for of in (sub(), sent) for messages in (ASK, TELL)]
    assert len(set(ids)) == 4
    grown = [{"role": "system", "content": "now: 12:00"}, *ASK, {"role": "assistant", "content": "yes"}]
    assert conversation_of(sub(), grown).id == ids[0]
    keeps_its_state = config("t", f"tools|{task('model')}", lc_agent_name="planner")
    assert conversation_of(keeps_its_state, ASK) is conversation_of(keeps_its_state, TELL)


def test_a_sub_agent_names_who_called_it():
    """Its parent is the conversation that spoke last in the graph around its own."""
    boss = conversation_of(config("t", task("model"), lc_agent_name="boss"))
    tool, stranger = task("tools"), conversation_of(config("u", f"{task('tools')}|{task('model')}"), ASK)
    sub = conversation_of(config("t", f"{tool}|{task('model')}", lc_agent_name="planner"), ASK)
    below = conversation_of(config("t", f"{tool}|{task('tools')}|{task('model')}"), ASK)
    assert (boss.parent, sub.parent, below.parent) == (None, boss.id, sub.id)
    assert stranger.parent not in {None, boss.id}


def test_a_tool_knows_who_waits_for_it():
    """The agent whose graph the tool's node belongs to, or the current conversation."""
    boss = conversation_of(config("t", task("model")))
    sub = conversation_of(config("t", f"tools|{task('model')}"), ASK)
    for path, waiting in ((task("tools"), boss), (f"tools|{task('tools')}", sub), ("other|tools", None)):
        with scope(config("t", path)):
            assert waiting_conversation() is waiting
            with bidikv.conversation() as current:
                assert waiting_conversation() is current


def test_thread_id_of_any_type():
    """Thread ids need not be text, and a number is the same thread as its digits, as for checkpointers."""
    assert conversation_of(config(7)).id == conversation_of(config("7")).id


def test_no_thread():
    """Without a thread there is no conversation."""
    assert conversation_of({}) is None
    assert place_of({"configurable": None}) is None
    assert conversation_of({"metadata": {"thread_id": "t"}}).id == conversation_of(config("t")).id


def test_internal_calls_are_aside():
    """What middleware asks for itself is neither the thread's next turn nor retained, and works for who spoke last."""
    main = conversation_of(config("t", task("model")))
    aux = conversation_of(config("t", task("Summary.before_model"), lc_source="summarization"))
    assert (aux.kind, aux.parent, aux.agent, aux.retain_s) == ("aux", main.id, "summarization", 0.0)
    with scope(config("t", lc_source="summarization")), aux:
        assert call_conversation(None) is aux
    marked = [conversation_of(config("t", lc_internal_call=uuid.uuid4().hex)) for _ in range(2)]
    assert {conversation.agent for conversation in marked} == {"internal"}
    assert marked[0].id == marked[1].id
    unmarked = conversation_of(config("t", task("Summary.before_model")))
    assert (unmarked.kind, unmarked.agent, unmarked.parent) == ("aux", "Summary", main.id)


def test_choice():
    """The model's own conversation goes before the current one, and that before the run's."""
    own, current = bidikv.conversation(), bidikv.conversation()
    with scope(config("t")):
        assert call_conversation(None).id == conversation_of(config("t")).id
        with current:
            assert call_conversation(None) is current
            assert call_conversation(own) is own
    with scope(config("t", lc_source="s")), current:
        assert call_conversation(None).parent == current.id
    assert call_conversation(None) is None


def test_scope_ends():
    """A scope leaves nothing behind."""
    with scope(config("t")), scope(config("u")):
        assert call_config()["configurable"]["thread_id"] == "u"
    assert not call_config()["configurable"]


def test_threads_are_bounded():
    """What was used longest ago is forgotten first."""
    threads = Threads(max_conversations=3)
    for number in range(9):
        for name in ("kept", str(number)):
            threads.conversation(place_of(config(name)), ASK, secret=None)
    assert len(threads) == len(threads._speakers) == 3
    assert [len(threads.of_thread(name)) for name in ("kept", "8", "5")] == [1, 1, 0]


def test_a_thread_ends():
    """All its conversations are released, through the clients that made their calls, and forgotten."""
    router = FakeRouter()
    clients = router.client(), router.async_client()

    async def aask(of):
        with scope(of):
            await clients[1].chat.completions.create(model="m", messages=ASK)
        await aclose_thread("b")

    for path in (task("model"), f"tools|{task('model')}"):
        with scope(config("a", path)):
            clients[0].chat.completions.create(model="m", messages=ASK)
    assert [turn.reason for turn in thread_report("a").turns] == ["new_conversation"] * 2
    close_thread("a")
    assert [told.method for told in router.told] == ["DELETE"] * 2
    asyncio.run(aask(config("b")))
    assert len(router.told) == 3
    assert router.held == ()
    assert thread_report("a").turns == thread_report("b").turns == ()
