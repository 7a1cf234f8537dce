"""One owner of retries: how often a call goes out, counted on the wire, and how long it waits in between."""

from __future__ import annotations

import asyncio

import openai
import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

import bidikv
from bidikv.retry import RetryPolicy, _retry_after_s
from bidikv.testing import FakeRouter

HELLO = [{"role": "user", "content": "hello"}]
AT_ONCE = {"first_wait_s": 0.0, "max_wait_s": 0.0}


@pytest.fixture
def router():
    return FakeRouter()


@pytest.fixture
def slept(monkeypatch):
    """The waits that tenacity was told to make, in seconds; none is made."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(tenacity.nap.time, "sleep", waits.append)
    monkeypatch.setattr(tenacity.asyncio, "_portable_async_sleep", sleep)
    return waits


def ask(client, **options):
    return client.chat.completions.create(model="m", messages=HELLO, **options)


def test_the_policy_retries_and_the_client_does_not(router, slept):
    """Two failures and an answer are one turn with one id, three times on the wire."""
    router.fail(503, times=2)
    client = router.client(conversation="a", retry=RetryPolicy(first_wait_s=1.0))
    ask(client)
    assert client.max_retries == 0
    assert len(router.requests) == 3
    assert len({request.headers["x-bidikv-turn"] for request in router.requests}) == 1
    assert len(client._bidikv.conversation.turns) == 1
    assert 0.75 <= slept[0] <= 1.0 < slept[1] <= 2.0


def test_what_is_given_up_says_so(router, slept):
    """The last error keeps its class, and is one that retries further out leave alone."""
    router.fail(429, times=9)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(router.client(retry=RetryPolicy(attempts=3)))
    assert len(router.requests) == 3
    assert isinstance(caught.value, bidikv.RetriesExhausted)
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.attempts, caught.value.status_code) == (3, 429)
    assert type(caught.value).__name__ == "RateLimitError"
    assert not bidikv.is_transient(caught.value)


def test_asynchronous(router, slept):
    """The asynchronous client does the same."""
    router.fail(503, times=9)

    async def run():
        async with router.async_client(retry=RetryPolicy(attempts=2)) as client:
            await ask(client)

    with pytest.raises(openai.InternalServerError) as caught:
        asyncio.run(run())
    assert (len(router.requests), caught.value.attempts) == (2, 2)


def test_what_is_not_transient_is_not_tried_again(router, slept):
    """A mistake of the caller comes back at once, and unmarked."""
    router.fail(400)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(router.client(retry=RetryPolicy()))
    assert len(router.requests) == 1
    assert not isinstance(caught.value, bidikv.RetriesExhausted)


def test_retry_after(router, slept):
    """The server's wait is kept, also where it is longer than ours would be."""
    router.fail(503, retry_after_s=30)
    ask(router.client(retry=RetryPolicy()))
    assert slept == [30.0]


def test_no_wait_goes_beyond_the_budget(router, slept):
    """A wait for which there is no time is not begun."""
    router.fail(503, retry_after_s=61)
    with pytest.raises(openai.InternalServerError) as caught:
        ask(router.client(retry=RetryPolicy()))
    assert (slept, len(router.requests), caught.value.attempts) == ([], 1, 1)


def test_never_inside_a_stream(router, slept):
    """A stream that breaks raises what it broke with; only its beginning is tried again."""
    client = router.client(retry=RetryPolicy(**AT_ONCE))
    router.fail(503)
    router.break_stream()
    stream = ask(client, stream=True)
    read = []
    with pytest.raises(openai.APIError):
        read += [chunk.choices[0].delta.content for chunk in stream]
    assert len(router.requests) == 2


def test_whoever_names_retries_owns_them(router, slept):
    """`with_options(max_retries=...)`, as frameworks call it, takes them from the policy."""
    router.fail(503, times=10)
    client = router.client(retry=RetryPolicy(**AT_ONCE))
    plain = router.client(max_retries=5)
    for derived, count in (
        (client.with_options(timeout=3), 4),
        (client.with_options(max_retries=0), 1),
        (plain.copy(_extra_kwargs={"retry": RetryPolicy(attempts=2, **AT_ONCE)}), 2),
        (bidikv.wrap(plain, retry=RetryPolicy(attempts=3, **AT_ONCE)), 3),
    ):
        router.requests.clear()
        with pytest.raises(openai.InternalServerError):
            ask(derived)
        assert len(router.requests) == count


def test_the_server_may_say_whether(slept):
    """`x-should-retry` goes before the status."""
    fake = FakeRouter()

    def answering(status, said):
        fake.fail(status, times=2)
        original = fake.answer

        def answer(*request):
            code, headers, body = original(*request)
            return code, headers | {"x-should-retry": said}, body

        fake.answer = answer
        fake.requests.clear()
        with pytest.raises(openai.APIStatusError):
            ask(fake.client(retry=RetryPolicy(attempts=2, **AT_ONCE)))
        fake.answer = original
        return len(fake.requests)

    assert answering(503, "false") == 1
    fake._script.clear()
    assert answering(400, "true") == 2


def test_connections_are_tried_again(slept):
    """Nobody listens: that is transient too, and a conversation's end does not wait for it."""
    client = bidikv.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", retry=RetryPolicy(attempts=2))
    with pytest.raises(openai.APIConnectionError) as caught:
        ask(client)
    assert caught.value.attempts == 2
    conversation = bidikv.conversation("a")
    conversation.links().add("0" * 32, client)
    conversation.close()
    assert len(slept) == 1


def test_langgraph_does_not_multiply(router, slept):
    """A node's own retry policy leaves alone what ours has given up."""
    graph_module = pytest.importorskip("langgraph.graph")
    types = pytest.importorskip("langgraph.types")
    client = router.client(retry=RetryPolicy(attempts=3, **AT_ONCE))

    def node(state):
        return {"answer": ask(client).choices[0].message.content}

    def counted(policy):
        router.requests.clear()
        graph = graph_module.StateGraph(dict)
        graph.add_node("call", node, retry_policy=policy)
        graph.add_edge("__start__", "call")
        with pytest.raises(openai.InternalServerError):
            graph.compile().invoke({})
        return len(router.requests)

    router.fail(503, times=30)
    assert counted(types.RetryPolicy(max_attempts=3, initial_interval=0.001)) == 3
    assert counted(types.RetryPolicy(max_attempts=3, retry_on=bidikv.is_transient)) == 3


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"budget_s": -1}, {"first_wait_s": float("nan")}])
def test_wrong_policies(wrong):
    """A policy that cannot mean anything is refused."""
    with pytest.raises(bidikv.ConfigurationError, match=next(iter(wrong))):
        RetryPolicy(**wrong)


@given(st.dictionaries(st.sampled_from(["retry-after", "retry-after-ms"]), st.text(max_size=8)))
def test_waits_are_durations(headers):
    """No header makes a wait that is none."""
    waited = _retry_after_s(headers)
    assert waited is None or waited >= 0
