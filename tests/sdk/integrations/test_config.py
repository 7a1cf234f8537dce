"""Which conversation a LangChain config stands for."""

from __future__ import annotations

import uuid

import bidikv
from bidikv.integrations._config import call_config, call_conversation, conversation_of, node_path, scope


def config(thread_id, path="", **metadata):
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": path}, "metadata": metadata}


def test_node_path_loses_task_ids():
    """Task ids change with every step, the path of nodes does not."""
    assert node_path(f"team:{uuid.uuid4()}|planner:{uuid.uuid4()}") == "team|planner"
    assert node_path("model") == "model"
    assert node_path(None) == ""


def test_same_node_at_another_step():
    """A node's turns are one conversation."""
    first, second = (conversation_of(config("t", f"model:{uuid.uuid4()}")) for _ in range(2))
    assert first.id == second.id
    assert first.agent == "model"


def test_threads_and_nodes_differ():
    """Threads are apart, and so are the agents within one."""
    places = [("t", "a"), ("u", "a"), ("t", "b"), ("t", "a|b"), ("t", "")]
    assert len({conversation_of(config(*place)).id for place in places}) == len(places)


def test_sub_agent_names_its_parent():
    """A nested node is a child of the node that it runs in."""
    assert conversation_of(config("t", "tools|model")).parent == conversation_of(config("t", "tools")).id


def test_thread_id_of_any_type():
    """Thread ids need not be text, and a number is the same thread as its digits, as for checkpointers."""
    assert conversation_of(config(7)).id == conversation_of(config("7")).id


def test_no_thread():
    """Without a thread there is no conversation."""
    assert conversation_of({}) is None
    assert conversation_of({"configurable": None}) is None
    assert conversation_of({"metadata": {"thread_id": "t"}}).id == conversation_of(config("t")).id


def test_internal_calls_are_aside():
    """What middleware asks for itself is neither the thread's next turn nor retained."""
    main, aux = conversation_of(config("t")), conversation_of(config("t", lc_source="summarization"))
    assert (aux.kind, aux.parent, aux.agent, aux.retain_s) == ("aux", main.id, "summarization", 0.0)
    assert conversation_of(config("t", lc_internal_call=True)).agent == "internal"


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
