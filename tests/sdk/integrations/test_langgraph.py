"""The chat model inside and outside of graphs, against a router that records what it is sent."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel, SecretStr

import bidikv
from bidikv.headers import READBACK_HEADER, TURN_HEADER, TurnHeader
from bidikv.integrations.langgraph import BidiKVChat


@tool
def look(path: str, depth: int) -> str:
    """Look at a path."""
    return f"{path} at {depth}"


@tool
def ask(question: str) -> str:
    """Ask somebody."""
    return question


class Answer(BaseModel):
    """The answer."""

    what: str


@pytest.fixture
def chat(router):
    """A chat model of the router in memory."""
    return BidiKVChat(model="m", client=router.client(), async_client=router.async_client())


def thread(name):
    return {"configurable": {"thread_id": name}}


def loop(chat, calls=2):
    """A graph that calls `look` a few times, then answers."""

    async def amodel(state):
        return {"messages": [await bound(state).ainvoke(state["messages"])]}

    def model(state):
        return {"messages": [bound(state).invoke(state["messages"])]}

    def bound(state):
        done = sum(isinstance(message, ToolMessage) for message in state["messages"])
        return chat.bind_tools([look], tool_choice="look" if done < calls else "none")

    def tools(state):
        return {"messages": [look.invoke(call) for call in state["messages"][-1].tool_calls]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", RunnableLambda(model, afunc=amodel))
    graph.add_node("tools", tools)
    graph.add_edge(START, "model")
    graph.add_conditional_edges(
        "model",
        lambda state: "tools" if state["messages"][-1].tool_calls else "__end__",
        ["tools", "__end__"],
    )
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=MemorySaver())


def test_graph_turns_are_one_conversation(router, chat):
    """All turns of a thread carry one id, another thread another, and the index counts up."""
    graph = loop(chat)
    router.raw_args = '{ "path" :"a.py","depth": 1}'
    graph.invoke({"messages": [HumanMessage("hi")]}, thread("a"))
    graph.invoke({"messages": [HumanMessage("hi")]}, thread("b"))
    first, second = router.sessions[:3], router.sessions[3:]
    assert len(set(first)) == len(set(second)) == 1
    assert first != second
    turns = [TurnHeader.parse(value) for value in router.header(TURN_HEADER)[:3]]
    assert [(turn.index, turn.kind, turn.agent) for turn in turns] == [
        (0, "main", "model"),
        (1, "tool", "model"),
        (2, "tool", "model"),
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_histories_only_grow(router, chat, streaming):
    """Each prompt starts with the one before, and holds the model's own spelling of what it wrote."""
    router.raw_args = '{ "path" :"\\u00e9.py","depth": 1}'
    router.reasoning = "Let me look."
    graph, question = loop(chat), {"messages": [HumanMessage("hi")]}
    if streaming:
        list(graph.stream(question, thread("a"), stream_mode="messages"))
    else:
        graph.invoke(question, thread("a"))
    graph.invoke({"messages": [HumanMessage("and?")]}, thread("a"))
    bodies = router.bodies
    for before, after in itertools.pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]
    answer = bodies[1]["messages"][1]
    assert answer == {
        "role": "assistant",
        "content": None,
        "reasoning": "Let me look.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": router.raw_args}}
        ],
    }
    assert bodies[0].get("stream", False) is streaming


def test_stream_mode_messages(router, chat):
    """Tokens and tool calls arrive piece by piece, and the account once per turn."""
    router.raw_args = '{"path":"a.py","depth":1}'
    pieces = [
        piece
        for piece, _ in loop(chat, calls=1).stream(
            {"messages": [HumanMessage("hi")]}, thread("a"), stream_mode="messages"
        )
        if isinstance(piece, AIMessageChunk)
    ]
    assert "".join(piece.text for piece in pieces) == router.text
    assert sum(bool(piece.text) for piece in pieces) == 2
    raw = "".join(call["args"] or "" for piece in pieces for call in piece.tool_call_chunks)
    assert raw == router.raw_args
    accounts = [piece.response_metadata["bidikv"] for piece in pieces if "bidikv" in piece.response_metadata]
    assert [account["reason"] for account in accounts] == ["new_conversation", "hit"]
    assert all(account["ttft_s"] > 0 for account in accounts)


def test_async_graph(router, chat):
    """The asynchronous paths name the same conversations and keep concurrent threads apart."""
    router.raw_args = '{"path":"a.py","depth":1}'
    graph = loop(chat)

    async def run(name):
        async for _ in graph.astream(
            {"messages": [HumanMessage(name)]}, thread(name), stream_mode="messages"
        ):
            pass
        return await graph.aget_state(thread(name))

    async def both():
        return await asyncio.gather(run("a"), run("b"))

    for state in asyncio.run(both()):
        assert state.values["messages"][-1].text == router.text
    graph.invoke({"messages": [HumanMessage("a")]}, thread("a"))
    by_thread = {}
    for body, session in zip(router.bodies, router.sessions, strict=True):
        by_thread.setdefault(body["messages"][0]["content"], set()).add(session)
    assert {name: len(sessions) for name, sessions in by_thread.items()} == {"a": 1, "b": 1}
    assert by_thread["a"] != by_thread["b"]


def test_message_of_each_path(router, chat):
    """Whole, streamed and asynchronous answers are the same message."""
    router.raw_args, router.reasoning = '{ "path":"a.py" ,"depth":1}', "hm"
    bound = chat.bind_tools([look], tool_choice="look")

    async def collect():
        merged = None
        async for piece in bound.astream("hi"):
            merged = piece if merged is None else merged + piece
        return [await bound.ainvoke("hi"), merged]

    merged = None
    for piece in bound.stream("hi"):
        merged = piece if merged is None else merged + piece
    for message in [bound.invoke("hi"), merged, *asyncio.run(collect())]:
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("look", {"path": "a.py", "depth": 1})
        assert message.additional_kwargs["bidikv"] == {
            "reasoning": "hm",
            "args": {call["id"]: router.raw_args},
            "null": True,
        }
        assert message.usage_metadata == {
            "input_tokens": 100,
            "output_tokens": 5,
            "total_tokens": 105,
            "input_token_details": {"cache_read": 0},
        }
        assert message.response_metadata["bidikv"]["computed_tokens"] == 100
        assert message.response_metadata["finish_reason"] == "stop"


def test_explicit_config_outside_a_graph(router, chat):
    """A config given to the model itself is seen, on every path and through bindings."""
    chat.invoke("hi", thread("a"))
    chat.bind(temperature=0).invoke("hi", thread("a"))
    list(chat.stream("hi", thread("a")))
    chat.batch(["hi"], thread("a"))

    async def run():
        await chat.ainvoke("hi", thread("a"))
        async for _ in chat.astream("hi", thread("a")):
            pass

    asyncio.run(run())
    assert len(router.sessions) == 6
    assert len(set(router.sessions)) == 1
    assert None not in router.sessions


def test_streams_do_not_leak(router, chat):
    """Two interleaved streams keep their threads, and their caller keeps none."""
    first, second = chat.stream("hi", thread("a")), chat.stream("hi", thread("b"))
    next(first)
    next(second)
    chat.invoke("hi")
    first.close()
    list(second)
    assert router.sessions[2] is None
    assert router.sessions[0] != router.sessions[1]


def test_no_identity_outside(router, chat):
    """A bare call names no conversation, and still has its account."""
    message = chat.invoke("hi")
    assert router.sessions == [None]
    assert message.response_metadata["bidikv"]["session"] is None
    assert message.response_metadata["bidikv"]["reason"] == "new_conversation"


@pytest.mark.parametrize("given", ["mine", bidikv.Conversation("mine")])
def test_own_conversation(router, given):
    """A model with a conversation of its own uses that in every thread, and reports to it."""
    chat = BidiKVChat(model="m", client=router.client(), conversation=given)
    answer = chat.invoke("hi", thread("a"))
    chat.invoke("hi", thread("b"))
    assert set(router.sessions) == {bidikv.session_id("mine")}
    assert answer.response_metadata["bidikv"]["session"] == bidikv.session_id("mine")
    assert "conversation" not in chat.model_dump()


def test_current_conversation(router, chat):
    """A `with` block around a graph names its calls and collects its turns."""
    router.raw_args = '{"path":"a.py","depth":1}'
    with bidikv.conversation("w") as conversation:
        loop(chat).invoke({"messages": [HumanMessage("hi")]}, thread("a"))
    assert set(router.sessions) == {conversation.id}
    assert [turn.reason for turn in conversation.turns] == ["new_conversation", "hit", "hit"]


def test_internal_calls(router, chat):
    """A summary made on the side does not pass for the thread's next turn."""
    chat.invoke("hi", thread("a"))
    chat.invoke("sum up", {**thread("a"), "metadata": {"lc_source": "summarization"}})
    main, aux = router.sessions
    turn = TurnHeader.parse(router.header(TURN_HEADER)[1])
    assert main != aux
    assert (turn.kind, turn.parent, turn.retain_s) == ("aux", main, 0.0)


def test_create_agent(router, chat):
    """LangChain's own agent runs on the model; its name is not sent back."""
    agent = create_agent(chat, [look], name="boss", checkpointer=MemorySaver(), system_prompt="Be brief.")
    for question in ("one", "two"):
        agent.invoke({"messages": [HumanMessage(question)]}, thread("a"))
    assert len(set(router.sessions)) == 1
    before, after = (body["messages"] for body in router.bodies)
    assert after[: len(before)] == before
    assert after[len(before)] == {"role": "assistant", "content": router.text}


def test_bind_tools(router, chat):
    """Tools are sent in the order given, and a choice takes the API's form."""
    for choice, sent in [
        ("ask", {"type": "function", "function": {"name": "ask"}}),
        ("any", "required"),
        ("auto", "auto"),
        (
            {"type": "function", "function": {"name": "ask"}},
            {"type": "function", "function": {"name": "ask"}},
        ),
        (None, None),
    ]:
        chat.bind_tools([look, ask], tool_choice=choice, parallel_tool_calls=False).invoke("hi")
        assert router.bodies[-1].get("tool_choice") == sent
        assert [offered["function"]["name"] for offered in router.bodies[-1]["tools"]] == ["look", "ask"]
        assert router.bodies[-1]["parallel_tool_calls"] is False
    chat.bind_tools([ask], tool_choice=True).invoke("hi")
    assert router.bodies[-1]["tool_choice"]["function"]["name"] == "ask"
    with pytest.raises(bidikv.ConfigurationError, match="fly"):
        chat.bind_tools([look], tool_choice="fly")


def test_structured_output(router, chat):
    """A schema constrains the answer, which is parsed into it."""
    router.text = '{"what": "router"}'
    assert chat.with_structured_output(Answer).invoke("hi") == Answer(what="router")
    sent = router.bodies[-1]["response_format"]
    assert sent["type"] == "json_schema"
    assert sent["json_schema"]["name"] == "Answer"
    assert sent["json_schema"]["schema"]["required"] == ["what"]
    schema = {"title": "answer", "description": "It.", **Answer.model_json_schema()}
    assert chat.with_structured_output(schema, strict=True).invoke("hi") == {"what": "router"}
    assert router.bodies[-1]["response_format"]["json_schema"]["strict"] is True


def test_structured_output_by_tool(router, chat):
    """A schema can be asked for as a tool call too."""
    router.raw_args = '{"what":"router"}'
    model = chat.with_structured_output(Answer, method="function_calling")
    assert model.invoke("hi") == Answer(what="router")
    assert router.bodies[-1]["tool_choice"]["function"]["name"] == "Answer"


def test_structured_output_with_raw(router, chat):
    """With the raw message asked for, a bad answer is told, not raised."""
    model = chat.with_structured_output(Answer, include_raw=True)
    bad = model.invoke("hi")
    assert isinstance(bad["raw"], AIMessage)
    assert bad["parsed"] is None
    assert bad["parsing_error"] is not None
    router.text = '{"what": "router"}'
    assert model.invoke("hi")["parsed"] == Answer(what="router")


def test_malformed_arguments(router, chat):
    """Arguments that are no JSON are kept and sent back raw."""
    router.raw_args = '{"path": "a'
    bound = chat.bind_tools([look], tool_choice="look")
    answer = bound.invoke("hi")
    assert answer.invalid_tool_calls[0]["args"] == router.raw_args
    bound.invoke([HumanMessage("hi"), answer, ToolMessage("error", tool_call_id="call_1")])
    assert router.bodies[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == router.raw_args


def test_fields_reach_the_wire(router):
    """Fields and call arguments become request fields; call arguments win."""
    chat = BidiKVChat(
        model="m",
        client=router.client(),
        temperature=0.5,
        max_tokens=7,
        extra_body={"top_k": 1, "min_p": 0.1},
        extra_headers={"X-Team": "a"},
        readback=False,
    )
    chat.invoke(
        "hi", stop=["x"], max_tokens=9, extra_body={"top_k": 2}, extra_headers={"X-Session-ID": "mine_mine"}
    )
    body = router.bodies[0]
    expected = {"temperature": 0.5, "max_tokens": 9, "stop": ["x"], "top_k": 2, "min_p": 0.1}
    assert {name: body[name] for name in expected} == expected
    assert router.header("X-Team") == ["a"]
    assert router.header(READBACK_HEADER) == ["off"]
    assert router.sessions == ["mine_mine"]


def test_stream_usage_can_be_off(router):
    """Engines that know no stream options are not sent any."""
    list(BidiKVChat(model="m", client=router.client(), stream_usage=False).stream("hi"))
    assert "stream_options" not in router.bodies[0]


def test_key_of_another_service_stays_home(monkeypatch):
    """Without a key of its own, the model does not send the environment's OpenAI key to a router."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    chat = BidiKVChat(model="m", base_url="http://router/v1", timeout=3)
    assert chat._sync().api_key == chat._async().api_key == "none"
    assert chat._sync() is chat._sync()
    assert chat._sync().timeout == 3
    assert chat.model_copy(update={"base_url": "http://other/v1"})._sync().base_url.host == "other"
    secret = BidiKVChat(model="m", base_url="http://router/v1", api_key=SecretStr("mine"))
    assert secret._sync().api_key == "mine"
    assert "mine" not in repr(secret)


def test_served_over_a_socket(router, served):
    """The model's own clients work over HTTP, streaming too."""
    chat = BidiKVChat(model="m", base_url=served)
    assert chat.invoke("hi").text == router.text
    assert "".join(piece.text for piece in chat.stream("hi")) == router.text
    chat._sync().close()


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_astream_events(router, chat, version):
    """Both forms of LangChain's events carry the text piece by piece, and the calls are the thread's."""
    if version == "v3" and not hasattr(chat, "stream_events"):
        pytest.skip("this LangChain has no such events")
    graph = loop(chat, calls=0)

    async def run():
        told = {"messages": [HumanMessage("hi")]}
        events = graph.astream_events(told, thread("events"), version=version)
        return [event async for event in (await events if asyncio.iscoroutine(events) else events)]

    events = asyncio.run(run())
    assert router.bodies[0]["stream"] is True
    assert router.sessions[0].startswith("c_")
    if version == "v2":
        pieces = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
        assert "".join(piece.text for piece in pieces) == router.text
        assert sum(bool(piece.text) for piece in pieces) == 2
    else:
        assert router.text.split()[-1] in json.dumps(events, default=str)


def test_an_agent_that_answers_by_a_schema(router, chat):
    """`create_agent(response_format=...)` gets its object, by a tool that the model has to call."""
    router.raw_args = '{"what" :"a router"}'
    agent = create_agent(chat, [], response_format=ToolStrategy(Answer), checkpointer=MemorySaver())
    told = {"messages": [HumanMessage("hi")]}
    assert agent.invoke(told, thread("schema"))["structured_response"] == Answer(what="a router")


def test_reasoning_can_stay_out(router):
    """It goes back unless that is switched off."""
    router.reasoning = "Let me see."
    for keep in (True, False):
        chat = BidiKVChat(model="m", client=router.client(), keep_reasoning=keep)
        answer = chat.invoke("hi")
        chat.invoke([HumanMessage("hi"), answer, HumanMessage("and?")])
        assert ("reasoning" in router.bodies[-1]["messages"][1]) is keep


def test_history_that_changes_can_raise(served):
    """The model's own clients do what the model was told to do about drift, together and not each for itself."""
    chat = BidiKVChat(model="m", base_url=served, on_drift="raise")
    first = [HumanMessage("one"), AIMessage("1"), HumanMessage("two")]
    chat.invoke(first, thread("drifts"))
    with pytest.raises(bidikv.DriftError, match="messages\\[0\\]"):
        chat.invoke(
            [HumanMessage("One"), *first[1:], AIMessage("2"), HumanMessage("three")], thread("drifts")
        )
    chat._sync().close()
    assert chat._sync()._bidikv.memory is chat._async()._bidikv.memory


def test_a_secret_keys_the_ids(router):
    """Of the model's thread, of its own conversation, and of a plain client's in a node."""
    for secret in (b"one", b"two", b"one"):
        client = router.client(secret=secret)
        chat = BidiKVChat(model="m", client=client)
        chat.invoke("hi", thread("keyed"))
        chat.model_copy(update={"conversation": "mine"}).invoke("hi")
        RunnableLambda(
            lambda _, client=client: client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
        ).invoke(None, thread("keyed"))
    ids = [router.sessions[start : start + 3] for start in (0, 3, 6)]
    assert ids[0] == ids[2]
    assert all(one != two for one, two in zip(ids[0], ids[1], strict=True))
    assert all(of[0] == of[2] != of[1] for of in ids)


def test_traces_name_the_model(chat):
    """What LangSmith and the like show of it."""
    params = chat._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"], params["ls_model_type"]) == (
        "bidikv",
        "m",
        "chat",
    )


def test_answers_survive_json(chat, router):
    """What is kept of an answer can be checkpointed."""
    router.raw_args = '{"path":"a.py","depth":1}'
    answer = chat.bind_tools([look], tool_choice="look").invoke("hi")
    assert AIMessage.model_validate(json.loads(answer.model_dump_json())) == answer
