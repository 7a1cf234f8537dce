"""What reaches the wire: every class of client, every form of call. Runs with each supported version of openai."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pydantic
import pytest

import bidikv
from bidikv.headers import TURN_HEADER
from bidikv.testing import FakeRouter, ToolCall, _http

HELLO = [{"role": "user", "content": "hello"}]
AZURE = {"azure_endpoint": "http://router", "api_version": "1", "api_key": "k"}
PLAIN = {"base_url": "http://router/v1", "api_key": "k"}
SYNC = {bidikv.OpenAI: PLAIN, bidikv.AzureOpenAI: AZURE}
ASYNC = {bidikv.AsyncOpenAI: PLAIN, bidikv.AsyncAzureOpenAI: AZURE}


class Answer(pydantic.BaseModel):
    """What the parsed call returns."""

    what: str


@pytest.fixture
def router():
    return FakeRouter('{"what": "router"}')


def http_client(router, kind="Client"):
    return getattr(_http(), kind)(transport=router.transport())


def ask(client, **options):
    return client.chat.completions.create(model="m", messages=HELLO, **options)


@pytest.mark.parametrize("kind", SYNC)
def test_every_form_of_call(router, kind):
    """Each form names the conversation once, and its answer has an account."""
    client = kind(**SYNC[kind], http_client=http_client(router), conversation="a")
    chat = client.chat.completions
    reports = [bidikv.turn_of(ask(client))]
    with ask(client, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    reports.append(bidikv.turn_of(stream))
    raw = chat.with_raw_response.create(model="m", messages=HELLO)
    assert bidikv.turn_of(raw) is bidikv.turn_of(raw.parse())
    reports.append(bidikv.turn_of(raw))
    with chat.with_streaming_response.create(model="m", messages=HELLO) as streaming:
        reports.append(bidikv.turn_of(streaming))
        assert router.text in streaming.parse().choices[0].message.content
    parsed = chat.parse(model="m", messages=HELLO, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(what="router")
    reports.append(bidikv.turn_of(parsed))
    with chat.stream(model="m", messages=HELLO) as events:
        events.until_done()
    reports.append(bidikv.turn_of(events))
    reports.append(bidikv.turn_of(client.responses.create(model="m", input="hello")))
    reports.append(bidikv.turn_of(client.completions.create(model="m", prompt="hello")))
    assert text == router.text
    assert set(router.sessions) == {bidikv.session_id("a")}
    assert len(router.requests) == len(reports) == len(client._bidikv.conversation.turns) == 8
    assert client._bidikv.conversation.turns == reports
    assert all(report.reuse is not None and report.key is not None for report in reports)
    assert [report.ttft_s is not None for report in reports] == [
        False,
        True,
        False,
        False,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("kind", ASYNC)
def test_every_form_of_asynchronous_call(router, kind):
    """The asynchronous clients do the same."""

    async def run():
        client = kind(**ASYNC[kind], http_client=http_client(router, "AsyncClient"), conversation="a")
        chat = client.chat.completions
        answers = [await ask(client), await ask(client, stream=True)]
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in answers[1]]) == router.text
        raw = await chat.with_raw_response.create(model="m", messages=HELLO)
        assert raw.parse().choices[0].message.content == router.text
        answers.append(raw)
        async with chat.with_streaming_response.create(model="m", messages=HELLO) as streaming:
            answers.append(streaming)
        answers.append(await chat.parse(model="m", messages=HELLO, response_format=Answer))
        async with chat.stream(model="m", messages=HELLO) as events:
            await events.until_done()
        answers.append(events)
        answers.append(await client.responses.create(model="m", input="hello"))
        derived = copy.copy(client.with_options(timeout=3))
        assert type(derived) is kind
        await ask(derived)
        return [bidikv.turn_of(answer) for answer in answers]

    reports = asyncio.run(run())
    assert set(router.sessions) == {bidikv.session_id("a")}
    assert len(router.requests) == len(reports) + 1 == 8
    assert all(report.reuse is not None for report in reports)
    assert [report.ttft_s is not None for report in reports] == [
        False,
        True,
        False,
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("kind", SYNC)
@pytest.mark.parametrize("derive", [lambda c: c.copy(), lambda c: c.with_options(timeout=3), copy.copy])
def test_copies_know_the_same_conversations(router, kind, derive):
    """A copy keeps class and arguments, sends through itself, and compares with what the original sent."""
    original = kind(**SYNC[kind], http_client=http_client(router), conversation="a", on_drift="raise")
    ask(original)
    derived = derive(original)
    assert type(derived) is kind
    assert derived.chat.completions._client is derived
    answered = [*HELLO, {"role": "assistant", "content": "something else"}, *HELLO]
    with pytest.raises(bidikv.DriftError):
        derived.chat.completions.create(model="m", messages=answered)
    assert len(router.requests) == 1


class Special(openai.OpenAI):
    """A user's own subclass, whose constructor differs."""

    def __init__(self, router, label):
        super().__init__(**PLAIN, http_client=http_client(router))
        self.label = label


def test_wrap(router):
    """A client that exists already gets what ours do, shares its connections, and stays as it was."""
    plain = openai.OpenAI(
        **PLAIN, http_client=http_client(router), timeout=7, default_headers={"X-Mine": "1"}
    )
    ask(plain)
    plain.with_raw_response.models.list()
    wrapped = bidikv.wrap(plain, conversation="a")
    ask(wrapped)
    ask(wrapped.with_options(timeout=3))
    wrapped.with_raw_response.models.list()
    assert type(wrapped) is bidikv.OpenAI
    assert type(plain) is openai.OpenAI
    assert (wrapped._client, wrapped.timeout, wrapped.base_url) == (plain._client, 7, plain.base_url)
    assert router.requests[1].headers["x-mine"] == "1"
    assert router.sessions == [None, *[bidikv.session_id("a")] * 2]


def test_wrap_again(router):
    """A client of ours comes back with other options, and knows its conversations."""
    first = router.client(conversation="a")
    ask(first)
    again = bidikv.wrap(first, readback=False)
    answered = bidikv.turn_of(ask(again))
    assert (answered.reason, answered.drift.kind) == ("readback_off", "retry")
    assert first._bidikv.readback
    assert bidikv.wrap(first)._bidikv == first._bidikv


def test_wrap_every_class(router):
    """Azure, asynchronous and foreign subclasses keep their class; other things are refused."""
    special = bidikv.wrap(Special(router, "x"), conversation="a")
    ask(special)
    assert isinstance(special, Special)
    assert (special.label, router.sessions) == ("x", [bidikv.session_id("a")])
    azure = openai.AsyncAzureOpenAI(**AZURE, http_client=http_client(router, "AsyncClient"))
    wrapped = bidikv.wrap(azure, conversation="b")
    asyncio.run(ask(wrapped))
    assert type(wrapped) is bidikv.AsyncAzureOpenAI
    assert router.sessions[1] == bidikv.session_id("b")
    with pytest.raises(TypeError, match="not str"):
        bidikv.wrap("client")


def test_disabled(router):
    """Switched off, a client sends what the plain one would."""
    with bidikv.conversation("a"):
        ask(router.client(enabled=False, readback=False, conversation="b"))
    assert [name for name in router.requests[0].headers if "bidikv" in name or "session" in name] == []


class Broken(bidikv.Conversation):
    """A conversation that cannot say what it is."""

    def hints(self):
        raise LookupError("no hints today")


def test_a_failing_identity_never_fails_the_call(router, caplog):
    """The call goes out without a conversation, and the log has the traceback."""
    with Broken("a"):
        assert ask(router.client()).choices
    assert router.sessions == [None]
    assert "no hints today" in caplog.text


def test_bodies_are_not_edited(router):
    """Putting the model's spelling back leaves the caller's messages and tools as they are."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("b", "a")]
    router.reply(tool_calls=[ToolCall("a", '{ "x":1.0}', "call_1")])
    client = router.client(conversation="a")
    client.chat.completions.create(model="m", messages=HELLO, tools=tools)
    call = {"id": "call_1", "type": "function", "function": {"name": "a", "arguments": '{"x": 1.0}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    given = messages, tools[::-1]
    before = copy.deepcopy(given)
    client.chat.completions.create(model="m", messages=given[0], tools=given[1])
    assert given == before
    sent = router.requests[1].body
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{ "x":1.0}'
    assert sent["messages"][1]["content"] is None
    assert sent["tools"] == tools
    turn = client._bidikv.conversation.turns[1]
    assert (turn.reason, turn.drift.kind) == ("hit", "append")
    assert turn.restored == ("tools", "messages[1].tool_calls[0].function.arguments", "messages[1].content")


def test_the_callers_extra_body_is_what_is_put_right(router):
    """Messages in `extra_body` win over the argument, so they are what is compared and restored."""
    router.reply(tool_calls=[ToolCall("a", '{"x" :1}', "call_1")])
    client = router.client(conversation="a")
    ask(client)
    call = {"id": "call_1", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ask(client, extra_body={"messages": messages})
    sent = router.requests[1].body["messages"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"x" :1}'


def test_executors_and_threads(router):
    """`run_in` takes a conversation to where contexts do not reach."""
    client, conversation = router.client(), bidikv.conversation("a")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bidikv.run_in, conversation, ask, client, user="u").result()
        pool.submit(ask, client).result()
    thread = threading.Thread(target=bidikv.run_in, args=(conversation, ask, client))
    thread.start()
    thread.join()
    assert router.sessions == [conversation.id, None, conversation.id]
    assert router.requests[0].body["user"] == "u"


def test_hints_reach_the_header(router):
    """An inner hint wins, in its own task only; a final one is said once."""
    client, conversation = router.client(), bidikv.conversation("a", agent="main", retain_s=5)

    async def inside(number):
        async with conversation.hint(retain_s=number):
            await asyncio.sleep(0)
            await asyncio.to_thread(ask, client, user=str(number))

    async def both():
        async with conversation:
            await asyncio.gather(inside(1), inside(2))

    asyncio.run(both())
    with (
        conversation,
        conversation.hint(agent="planner", final=True),
        conversation.hint(kind="aux", retain_s=0),
    ):
        ask(client)
    with bidikv.conversation("b"), conversation.hint(final=True):
        ask(client)
    said = {request.body["user"]: request.turn.retain_s for request in router.requests[:2]}
    assert said == {"1": 1.0, "2": 2.0}
    last, other = (request.turn for request in router.requests[2:])
    assert (last.agent, last.final, last.kind, last.retain_s) == ("planner", True, "aux", 0.0)
    assert (other.agent, other.final) == (None, False)


def test_turns_say_how_long_their_tools_take(router):
    """A turn that may call a tool says when the next one comes: as guessed, and then as learnt."""
    client, conversation = router.client(), bidikv.conversation("a")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with conversation:
        ask(client, tools=tools)
        with conversation.tool("look", expected_s=90):
            ask(client, tools=tools)
        ask(client, tools=tools)
        ask(client, tools=tools, tool_choice="none")
        ask(client)
    waits = [request.turn.wait_s for request in router.requests]
    assert waits[0] == 30.0
    assert 80 < waits[1] <= 90
    assert 0 < waits[2] < 30
    assert waits[3:] == [None, None]
    assert [request.body for request in router.told] == [{"wait_s": 90}]


def test_ending_a_conversation(router):
    """`close` releases it on the router, once; `aclose` and `end` do so for the other clients."""
    client = router.client()
    with client.conversation("a") as first:
        ask(client)
    first.close()
    first.close()
    with client.conversation("b"):
        ask(client)
    client.end(client.conversation("b"))

    async def run():
        async with router.async_client() as talker, talker.conversation("c") as third:
            await ask(talker)
            with third.hint(wait_s=3):
                await ask(talker)
            async with third.tool("look", expected_s=2):
                pass
            third.close()
            assert router.held == (third.id,)
            await third.aclose()

    asyncio.run(run())
    assert router.held == ()
    assert [request.method for request in router.told] == ["DELETE", "DELETE", "POST", "DELETE"]
    assert bidikv.turn_of(run_again(client, first)).reason == "new_conversation"


def run_again(client, conversation):
    """Another turn of an ended conversation."""
    with conversation:
        return ask(client)


def test_ending_never_raises(router):
    """Neither a closed client nor a router that knows no such endpoint gets in the way."""
    client = router.client()
    with client.conversation() as conversation, conversation.tool("early"):
        ask(client)
    client.close()
    with conversation.tool("late"):
        pass
    conversation.close()
    bidikv.conversation().close()


def test_explain(router):
    """The router's advice, beside what the client saw of the history."""
    router.reply("a long answer, " * 20)
    client = router.client()
    with client.conversation("a") as conversation:
        opening = [{"role": "user", "content": "hello, " * 40}]
        client.chat.completions.create(model="m", messages=opening)
        first = client.explain(conversation)
        client.chat.completions.create(
            model="m", messages=[*opening, {"role": "assistant", "content": "I never said this"}, *HELLO]
        )
    second = client.explain(conversation.turns[-1])
    assert first.advice == "This is a fake router's advice on new_conversation."
    assert (second.drift.kind, second.drift.path, second.placement) == ("edit", "messages[1].content", "home")
    assert "messages[1].content is not what it was" in str(second)
    assert "fake router's advice on hit_diverged" in str(second)
    assert "I never said this" not in str(second)
    conversation.close()
    assert client.explain(conversation).advice is None
    with pytest.raises(ValueError, match="no turn"):
        client.explain("turn")

    async def run():
        async with router.async_client(conversation="b") as talker:
            return await talker.explain(await ask(talker))

    assert asyncio.run(run()).advice is not None


def test_report(router):
    """Sums, times and changes of a conversation, and a line for each turn."""
    client = router.client()
    with client.conversation("a", agent="x") as conversation:
        answer = ask(client, stream=True)
        list(answer)
        history = [*HELLO, bidikv.message_of(answer), {"role": "user", "content": "more, please" * 9}]
        client.chat.completions.create(model="m", messages=history)
        client.chat.completions.create(
            model="m", messages=[*history[:2], {"role": "user", "content": "!"}, *history[2:]]
        )
    report = conversation.report()
    assert [turn.reason for turn in report.turns] == ["new_conversation", "hit", "hit_diverged"]
    assert report.prompt_tokens == report.reused_tokens + report.computed_tokens
    assert report.remote_tokens > 0
    assert [drift.path for drift in report.drifts] == ["messages[2]"]
    assert report.ttft_s[0] > 0
    assert report.ttft_s[1:] == (None, None)
    lines = str(report).splitlines()
    assert len(lines) == 5
    assert "edit at messages[2]" in lines[3]
    assert [turn.index for turn in report.turns] == [0, 1, 1]


def test_from_env(router, monkeypatch):
    """Variables are read where they are asked for, and nowhere else."""
    for name, value in {
        "BASE_URL": "http://router/v1",
        "API_KEY": "k",
        "SESSION_SECRET": "s",
        "ON_DRIFT": "warn",
    }.items():
        monkeypatch.setenv(f"BIDIKV_{name}", value)
    client = bidikv.OpenAI.from_env(http_client=http_client(router), conversation="a")
    ask(client)
    assert router.sessions == [bidikv.session_id("a", secret=b"s")]
    assert client._bidikv.on_drift == "warn"
    assert bidikv.OpenAI(api_key="k", base_url="http://x")._bidikv.on_drift == "ignore"
    monkeypatch.setenv("BIDIKV_DISABLED", "on")
    monkeypatch.setenv("BIDIKV_READBACK", "0")
    settings = bidikv.AsyncOpenAI.from_env()._bidikv
    assert (settings.enabled, settings.readback) == (False, False)
    monkeypatch.setenv("BIDIKV_READBACK", "maybe")
    with pytest.raises(bidikv.ConfigurationError, match="BIDIKV_READBACK is one of"):
        bidikv.OpenAI.from_env()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restore": "some"}, "restore is one of"),
        ({"on_drift": "shout"}, "on_drift is one of"),
        ({"retry": bidikv.RetryPolicy(), "max_retries": 3}, "either retry or max_retries"),
        ({"conversation": 1.5}, "conversation key"),
        ({"secret": b"x" * 65, "conversation": "a"}, "conversation id"),
    ],
)
def test_wrong_arguments(router, options, message):
    """An argument that cannot mean anything is refused at once."""
    with pytest.raises(bidikv.ConfigurationError, match=message):
        router.client(**options)


def test_an_auxiliary_call_stands_beside_its_conversation(router):
    """It is neither compared nor remembered."""
    client = router.client(on_drift="raise")
    with client.conversation("a") as conversation:
        ask(client)
        with conversation.hint(kind="aux"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "title?"}])
        client.chat.completions.create(
            model="m", messages=[*HELLO, {"role": "assistant", "content": router.text}, *HELLO]
        )
    assert [turn.drift.kind if turn.drift else None for turn in conversation.turns] == [
        "start",
        None,
        "append",
    ]
    assert router.requests[1].headers[TURN_HEADER].count("aux") == 1


def test_this_is_the_version_asked_for():
    """When another version of openai is tried, it is that one which is loaded."""
    assert openai.__version__ == os.environ.get("BIDIKV_TEST_OPENAI_IS", openai.__version__)
