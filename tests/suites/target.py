"""Where a suite's clients send their calls: a fake router, or a real one and its engines; and what the turns are held to."""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid

import openai

import bidikv
from bidikv.headers import READBACK_HEADER, SESSION_HEADER
from bidikv.testing import FakeRouter, _http

ANSWER = '{"what": "sea"}'
"""Of the fake router: what fits the suites' schema too."""
STREAMS = frozenset({"stream", "stream_options"})
RUNNING = os.environ.get("BIDIKV_TEST_BASE_URL")
"""`BIDIKV_TEST_BASE_URL=http://127.0.0.1:8000/v1 pytest tests/sdk/test_client_suite.py` tries a cluster that runs already."""


class Target:
    """A router, and one caller's credential there: its own conversations, whatever others say.

    Args:
        base_url: With `/v1`.
        model: The one that it serves.
        block: Tokens that are reused together, or a multiple of those.
    """

    def __init__(self, base_url, model, block):
        self.base_url = base_url
        self.model = model
        self.block = block
        self.key = f"suite-{uuid.uuid4().hex}"
        self._open = contextlib.ExitStack()
        self._plain = None

    def options(self, **options):
        """Arguments that make a client one of this router."""
        return {
            "base_url": self.base_url,
            "api_key": self.key,
            "max_retries": 0,
            "timeout": 300,
            **options,
        }

    def client(self, kind=bidikv.OpenAI, **options):
        """A client, which is closed with the target."""
        return self._open.enter_context(kind(**self.options(**options)))

    def async_client(self, **options):
        """An asynchronous client, to be closed in its own loop."""
        return bidikv.AsyncOpenAI(**self.options(**options))

    def through_gateway(self, kind, http_client="Client"):
        """A client of Azure's class: its paths are no router's, so something in front of that has to translate."""
        http = _http()
        router = self.base_url.removesuffix("/v1")
        path = f"/openai/deployments/{self.model}"

        class Gateway(getattr(http, http_client)):
            def send(self, request, **options):
                url = str(request.url).partition("?")[0].replace(path, "/v1").replace("/openai/", "/v1/")
                request.url = http.URL(url)
                request.headers["authorization"] = f"Bearer {request.headers.pop('api-key')}"
                return super().send(request, **options)

        return kind(
            azure_endpoint=router,
            api_version="2026-01-01",
            api_key=self.key,
            max_retries=0,
            timeout=300,
            http_client=Gateway(timeout=300),
        )

    def ask_plain(self, method, request):
        """An answer of the OpenAI package's own client, a stranger in a fresh conversation without readback.

        Args:
            method: Of a client, the raw form of what is to be asked.
            request: Its arguments.
        """
        if self._plain is None:
            self._plain = self.client(openai.OpenAI, api_key=f"plain-{self.key}")
        # Another salt, so that no prefix cache has anything of it.
        salt = uuid.uuid4().hex
        headers = {READBACK_HEADER: "off", SESSION_HEADER: f"plain-{salt}"}
        fields = {**request, "extra_headers": headers, "extra_body": {"cache_salt": salt}}
        answer = method(self._plain)(**fields)
        reuse = bidikv.reuse_of(answer)
        assert (reuse.reason, reuse.remote_tokens, reuse.local_tokens) == ("readback_off", 0, 0)
        return answer.parse()

    def ask_plain_chat(self, request):
        """A chat completion of that client."""
        form = "parse" if isinstance(request.get("response_format"), type) else "create"
        return self.ask_plain(lambda c: getattr(c.chat.completions.with_raw_response, form), request)

    def reply(self, text=None, **answer):
        """Script the next answer where nothing thinks; engines think for themselves."""

    def same_as_plain(self, request, message):
        """A chat completion's answer, or what was sent for it, is what the plain client gets or sends."""
        raise NotImplementedError

    def compared(self, answered):
        """Which turns of a conversation are worth that."""
        return answered

    def reached(self, told):
        """What the router said of telling decode something of a conversation: whom it reached, and how."""
        return list(told["decode"].values())

    def close(self):
        """Close what it opened."""
        self._open.close()

    def check(self, turns, reasons=(), *, constrained=()):
        """Each turn's account: of a conversation that only grows, unless reasons say more of the first turns.

        A turn that hits reads back at least the whole prompt of the one before.

        Args:
            turns: In order.
            reasons: Of the first turns; a hit of all others.
            constrained: Those whose answer was held to a grammar: an engine may write it in other tokens than its text
                has, where the next turn's history then leaves it.
        """
        assert len(turns) >= 2
        expected = [*(reasons or ["new_conversation"])]
        expected += ["hit"] * (len(turns) - len(expected))
        for number, reason in enumerate(expected):
            found = turns[number].reason
            left = number - 1 in constrained and found == "hit_diverged"
            assert found == reason or left, f"turn {number}:\n{bidikv.ReuseReport(tuple(turns))}"
        for turn in turns:
            assert turn.prompt_tokens == turn.remote_tokens + turn.local_tokens + turn.computed_tokens
        for before, turn in itertools.pairwise(turns):
            if turn.reason in {"hit", "hit_diverged"}:
                assert turn.remote_tokens >= (before.prompt_tokens - 1) // self.block * self.block > 0
        assert len({turn.key for turn in turns}) == len({turn.session for turn in turns}) == 1

    @staticmethod
    def explained(client, turns):
        """The router tells of these turns, all of one conversation, what their answers' headers told."""
        told = client.get(f"/bidikv/conversations/{turns[-1].key}", cast_to=object)
        names = ("reason", "prompt_tokens", "remote_tokens", "computed_tokens")
        records = [tuple(record[name] for name in names) for record in reversed(told["recent"])]
        assert records == [tuple(getattr(turn, name) for name in names) for turn in turns]
        assert all(record["advice"] and record["placement"] for record in told["recent"])


class Fake(Target):
    """The router in memory, behind a socket: nothing thinks, and all that reaches it can be looked at."""

    def __init__(self, stack):
        self.router = FakeRouter(ANSWER)
        super().__init__(stack.enter_context(self.router.serve()), "fake", 16)

    def reply(self, text=None, **answer):
        """Script the next answer."""
        self.router.reply(text, **answer)

    def same_as_plain(self, request, message):
        """The plain client sends what was sent before, and nobody else's call was anybody's turn."""
        sent = [unstreamed(received.body) for received in self.router.requests]
        self.ask_plain_chat(request)
        body = unstreamed(self.router.requests[-1].body)
        assert body in sent, body


class Engines(Target):
    """A real router and real engines: what counts is what they answer."""

    def compared(self, answered):
        """Not the first, of which nothing was reused."""
        return answered[1:]

    def same_as_plain(self, request, message):
        """Greedy answers are equal."""
        assert said(self.ask_plain_chat(request).choices[0].message) == said(message)


def unstreamed(body):
    """A request as it is without a stream, nor a salt."""
    return {name: value for name, value in body.items() if name not in STREAMS | {"cache_salt"}}


def said(message):
    """Text and tool calls of a message, an object of the OpenAI package or what goes back in its place."""
    if isinstance(message, dict):
        text, calls = message.get("content"), [call["function"] for call in message.get("tool_calls") or ()]
    else:
        text, calls = message.content, [vars(call.function) for call in message.tool_calls or ()]
    assert text or calls, "nothing was generated"
    return text or "", [(call["name"], call["arguments"]) for call in calls]


@contextlib.contextmanager
def chosen_target():
    """A fake router; or the one that the environment names, whose model is the first that it lists."""
    with contextlib.ExitStack() as stack:
        if RUNNING is None:
            target = Fake(stack)
        else:
            with openai.OpenAI(base_url=RUNNING, api_key="none") as client:
                target = Engines(RUNNING, client.models.list().data[0].id, 32)
        stack.callback(target.close)
        yield target
