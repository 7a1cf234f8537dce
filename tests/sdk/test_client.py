"""The clients: which conversation a call names, and what becomes of the answer's account."""

from __future__ import annotations

import asyncio
import copy
import threading

import openai
import pydantic
import pytest
from langchain_core.runnables import RunnableLambda

import bidikv
from bidikv.headers import READBACK_HEADER, TURN_HEADER, TurnHeader

HELLO = [{"role": "user", "content": "hello"}]
TOOL_HISTORY = [
    *HELLO,
    {"role": "assistant", "content": ""},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]


def ask(client, **options):
    return client.chat.completions.create(model="m", messages=HELLO, **options)


def in_thread(thread_id, function):
    """Call a function as a LangChain run with this thread id would."""
    config = {"configurable": {"thread_id": thread_id}}
    return RunnableLambda(lambda _: function()).invoke("", config)


def test_no_identity(router):
    """A call that names no conversation goes out as the plain client would send it."""
    ask(router.client())
    assert router.sessions == [None]
    assert router.header(TURN_HEADER) == [None]
    assert router.header(READBACK_HEADER) == [None]


def test_precedence(router):
    """Header, body, current conversation, surrounding run, client: the nearest wins."""
    client = router.client(conversation="client's", default_headers={"x-session-id": "defaultdefault"})
    current = bidikv.conversation("current")
    ask(client)
    in_thread("t", lambda: ask(client))
    with current:
        in_thread("t", lambda: ask(client))
        ask(client, extra_body={"session_id": "body_session"})
        ask(
            router.client(conversation="client's"),
            extra_body={"session_id": "body_session"},
            extra_headers={"x-SESSION-id": "header_session"},
        )
    sessions = router.sessions
    assert sessions[0] == bidikv.session_id("client's")
    assert sessions[1] not in {sessions[0], current.id}
    assert sessions[2:] == [current.id, "body_session", "header_session"]


def test_default_header_is_kept(router):
    """A session set for the whole client stays, and its turns are described too."""
    ask(router.client(default_headers={"X-Session-ID": "defaultdefault"}))
    assert router.sessions == ["defaultdefault"]
    assert TurnHeader.parse(router.header(TURN_HEADER)[0]).index == 0


def test_omit(router):
    """`Omit` on a call takes the identity away."""
    with bidikv.conversation("a"):
        ask(router.client(conversation="b"), extra_headers={"X-Session-ID": openai.Omit()})
    assert router.sessions == [None]
    assert router.header(TURN_HEADER) == [None]


def test_a_field_that_is_taken_away_is_not_compared(router):
    """What the OpenAI client leaves out of a body counts as what it is: not there."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    client = router.client()
    with bidikv.conversation("a") as talk:
        ask(client, tools=[tool])
        ask(client, tools=[tool], extra_body={"tools": openai.Omit()})
        ask(client)
    assert [("tools" in body) for body in router.bodies] == [True, False, False]
    assert [turn.drift.kind for turn in talk.turns] == ["start", "tools", "retry"]


def test_unusable_body_session(router):
    """A body's session that no gateway would let through is neither repeated nor replaced."""
    with bidikv.conversation("a"):
        ask(router.client(), extra_body={"session_id": "é"})
    assert router.sessions == [None]


def test_callers_dicts_are_unchanged(router):
    """What the caller passed in is not written to."""
    headers, body, messages = {"X-Mine": "1"}, {"session_id": "body_session"}, copy.deepcopy(HELLO)
    router.client(conversation="a").chat.completions.create(
        model="m", messages=messages, extra_headers=headers, extra_body=body
    )
    assert (headers, body, messages) == ({"X-Mine": "1"}, {"session_id": "body_session"}, HELLO)
    assert router.header("X-Mine") == ["1"]


def test_retries_keep_the_turn(router, monkeypatch):
    """Two failed attempts and the third are one turn with one id."""
    client = router.client(conversation="a", max_retries=2)
    monkeypatch.setattr(client, "_sleep_for_retry", lambda **_: None)
    router.failures = [503, 503]
    ask(client)
    assert set(router.sessions) == {bidikv.session_id("a")}
    assert len(set(router.header(TURN_HEADER))) == 1
    assert len(router.requests) == 3
    assert len(client._bidikv.conversation.turns) == 1


def test_turn_header(router):
    """The turn header counts the answers in the history and knows a tool's result."""
    child = bidikv.conversation("a", retain_s=30).child("planner", retain_s=5)
    with child:
        router.client().chat.completions.create(model="m", messages=TOOL_HISTORY)
    turn = TurnHeader.parse(router.header(TURN_HEADER)[0])
    assert turn == TurnHeader(1, "tool", bidikv.session_id("a"), "planner", 5.0)


def test_callers_turn_header_wins(router):
    """A turn header set by the caller is left alone."""
    ask(router.client(conversation="a"), extra_headers={"X-BidiKV-Turn": "v=1, final"})
    assert router.header(TURN_HEADER) == ["v=1, final"]


def test_readback_off(router):
    """`readback=False` marks every generation, unless the call says otherwise."""
    client = router.client(readback=False)
    ask(client)
    ask(client, extra_headers={READBACK_HEADER: "on"})
    assert router.header(READBACK_HEADER) == ["off", "on"]


def test_other_endpoints(router):
    """Completions and responses carry the identity; requests that read no prompt do not."""
    client = router.client(conversation="a", readback=False)
    client.completions.create(model="m", prompt="x")
    client.completions.create(model="m", prompt="x")
    client.responses.create(model="m", input="x")
    client.models.list()
    session = bidikv.session_id("a")
    assert router.sessions == [session, session, session, None]
    assert router.header(READBACK_HEADER)[-1] is None
    indices = [TurnHeader.parse(value).index for value in router.header(TURN_HEADER)[:3]]
    assert indices == [0, 1, 2]


@pytest.mark.parametrize(
    "derive",
    [
        lambda client: client.copy(),
        lambda client: client.with_options(timeout=3),
        lambda client: client.with_options(max_retries=0, _extra_kwargs={}),
        copy.copy,
    ],
)
def test_copies(router, derive):
    """Copies keep class, conversation and readback, and send through themselves."""
    original = router.client(conversation="a", readback=False)
    derived = derive(original)
    ask(derived)
    assert type(derived) is bidikv.OpenAI
    assert derived.chat.completions._client is derived
    assert router.sessions == [bidikv.session_id("a")]
    assert router.header(READBACK_HEADER) == ["off"]
    assert derived._bidikv.conversation is original._bidikv.conversation


def test_copy_may_replace_our_arguments(router):
    """A copy can be given another conversation."""
    ask(router.client(conversation="a").copy(_extra_kwargs={"conversation": "b"}))
    assert router.sessions == [bidikv.session_id("b")]


def test_async_copies(router):
    """The asynchronous client copies alike."""

    async def run():
        client = copy.copy(router.async_client(conversation="a").with_options(timeout=3))
        assert type(client) is bidikv.AsyncOpenAI
        await ask(client)

    asyncio.run(run())
    assert router.sessions == [bidikv.session_id("a")]


def test_account_of_each_form(router):
    """Parsed, raw, streamed, helper and failed responses all give the account."""
    client = router.client(conversation="a", max_retries=0)
    response = ask(client)
    assert bidikv.reuse_of(response).reason == "new_conversation"
    assert "new_conversation" not in response.model_dump_json()
    assert (
        bidikv.reuse_of(client.chat.completions.with_raw_response.create(model="m", messages=HELLO)).reason
        == "hit"
    )
    with client.chat.completions.with_streaming_response.create(model="m", messages=HELLO) as response:
        assert bidikv.reuse_of(response).remote_tokens == 64
    with ask(client, stream=True) as stream:
        assert bidikv.reuse_of(stream).local_tokens == 16
    with client.chat.completions.stream(model="m", messages=HELLO) as events:
        assert bidikv.reuse_of(events).computed_tokens == 20
        assert events.get_final_completion().choices[0].message.content == router.text
        assert bidikv.turn_of(events).ttft_s > 0
    assert bidikv.reuse_of(client.responses.create(model="m", input="x")).prompt_tokens == 100
    assert len(client._bidikv.conversation.turns) == 6
    assert set(router.sessions) == {bidikv.session_id("a")}


def test_no_account(router):
    """Responses of a router that says nothing, and things that are no responses, have no account."""
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
    response = ask(router.client(lambda _: router.response(200, json=body)))
    assert bidikv.turn_of(response).reason is None
    assert bidikv.reuse_of(response) is None
    assert bidikv.reuse_of("text") is None
    assert bidikv.turn_of(body) is None


def test_error_carries_account(router):
    """A refused call may say why nothing was reused."""
    headers = {"x-bidikv-reuse": "v=1, reason=unsupported"}
    client = router.client(lambda _: router.response(400, headers=headers, json={}))
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client)
    assert bidikv.reuse_of(caught.value).reason == "unsupported"


class Answer(pydantic.BaseModel):
    """What the parsed call returns."""

    what: str


def test_parse(router):
    """`.parse` returns the caller's type, with identity and account."""
    router.text = '{"what": "router"}'
    parsed = router.client(conversation="a").chat.completions.parse(
        model="m", messages=HELLO, response_format=Answer
    )
    assert parsed.choices[0].message.parsed == Answer(what="router")
    assert bidikv.reuse_of(parsed).reason == "new_conversation"


def test_turns_are_reported(router):
    """A conversation collects its turns, with the time to the first output of streamed ones."""
    client = router.client()
    with client.conversation("a", agent="x") as conversation:
        ask(client)
        stream = ask(client, stream=True)
        assert conversation.turns[1].ttft_s is None
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    first, second = conversation.turns
    assert text == router.text
    assert (first.reason, first.ttft_s, first.session) == ("new_conversation", None, conversation.id)
    assert (second.reason, second.remote_tokens, second.local_tokens, second.computed_tokens) == (
        "hit",
        64,
        16,
        20,
    )
    assert second.prompt_tokens == 100
    assert second.ttft_s > 0
    assert bidikv.turn_of(stream) is second


def test_reports_leave_with_their_responses(router):
    """Remembering accounts does not keep responses alive."""
    from bidikv import reuse  # noqa: PLC0415

    before = len(reuse._reports._entries)
    client = router.client()
    for _ in range(3):
        ask(client)
    assert len(reuse._reports._entries) <= before + 1


def test_tasks_keep_apart(router):
    """Two tasks on one client name their own conversations, streaming included."""
    client = router.async_client()

    async def talk(key, barrier):
        async with client.conversation(key) as conversation:
            for _ in range(3):
                await barrier.wait()
                stream = await ask(client, stream=True, user=key)
                async for _chunk in stream:
                    await asyncio.sleep(0)
        assert all(turn.ttft_s is not None for turn in conversation.turns)

    async def both():
        barrier = asyncio.Barrier(2)
        await asyncio.gather(talk("a", barrier), talk("b", barrier))

    asyncio.run(both())
    assert [body["user"] for body in router.bodies] != ["a"] * 3 + ["b"] * 3
    for body, session in zip(router.bodies, router.sessions, strict=True):
        assert session == bidikv.session_id(body["user"])


def test_threads_keep_apart(router):
    """Two threads on one client name their own conversations."""
    client = router.client()
    barrier = threading.Barrier(2)

    def talk(key):
        with bidikv.conversation(key):
            for _ in range(3):
                barrier.wait()
                ask(client, user=key)

    threads = [threading.Thread(target=talk, args=(key,)) for key in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(router.requests) == 6
    for body, session in zip(router.bodies, router.sessions, strict=True):
        assert session == bidikv.session_id(body["user"])


def test_async_forms(router):
    """The asynchronous client reports parsed, raw and helper responses too."""

    async def run():
        client = router.async_client(conversation="a")
        assert bidikv.reuse_of(await ask(client)).reason == "new_conversation"
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
        assert bidikv.reuse_of(raw).reason == "hit"
        async with client.chat.completions.stream(model="m", messages=HELLO) as events:
            await events.until_done()
            assert bidikv.turn_of(events).ttft_s > 0
        await client.models.list()
        return client._bidikv.conversation

    assert len(asyncio.run(run()).turns) == 3
    assert router.sessions == [bidikv.session_id("a")] * 3 + [None]


def test_isinstance():
    """Frameworks that check for the OpenAI client's class accept ours."""
    assert isinstance(bidikv.OpenAI(api_key="k"), openai.OpenAI)
    assert isinstance(bidikv.AsyncOpenAI(api_key="k"), openai.AsyncOpenAI)
