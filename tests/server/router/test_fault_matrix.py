"""Every fault of every leg: the right answer or one clear error, and then as if the failed turn had never been."""

import contextlib
import json
from dataclasses import dataclass

import httpx2
import pytest
from fake_engine import Failure, FakeEngine, Host, echo_of, eventually, serving

from bidikv.headers import ReuseHeader
from bidikv_server.router.app import RouterApp, create_app
from bidikv_server.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

SESSION = {"X-Session-ID": "session-1"}
FAULTS = {
    "refuses the connection": None,
    "is busy": Failure(503),
    "hangs": Failure(hang=True),
    "answers 500": Failure(500),
    "dies before the first byte": Failure(dies="before"),
    "dies in mid answer": Failure(dies="mid"),
    "restarts on its address": Failure(dies="before"),
}
DOWN_AFTERWARDS = ("refuses the connection", "dies before the first byte", "dies in mid answer")
NEW_AFTERWARDS = (*DOWN_AFTERWARDS, "restarts on its address")
ERRORS = {
    "refuses the connection": (502, "engine_unreachable"),
    "hangs": (504, "engine_timed_out"),
    "dies before the first byte": (502, "engine_failed"),
    "dies in mid answer": (502, "engine_failed"),
    "restarts on its address": (502, "engine_failed"),
}
"""What the client is told when the only decode engine fails; after a 500 or a refusal that engine is tried once more."""


@dataclass
class Cluster:
    """Engines that can die, a router and a client."""

    engines: dict[str, FakeEngine]
    hosts: dict[str, Host]
    app: RouterApp
    client: httpx2.AsyncClient

    async def turn(self, *contents, stream=False):
        """One turn of the conversation."""
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": content}
            for number, content in enumerate(contents)
        ]
        body = {"model": "m", "messages": messages, "stream": stream}
        return await self.client.post("/v1/chat/completions", json=body, headers=SESSION)

    def known(self, key):
        """What the router remembers of the conversation's turns."""
        return self.app.table.turns(key)

    def arm(self, name, fault):
        """Let an engine's next leg go wrong."""
        engine, host = self.engines[name], self.hosts[name]
        engine.death = host.die
        if fault == "restarts on its address":
            engine.death = lambda: self.reborn(name)
        if FAULTS[fault] is not None:
            engine.failures.append(FAULTS[fault])

    async def reborn(self, name):
        """Replace an engine by a new one at the same address, which holds nothing."""
        engine = self.engines[name]
        if engine.index_lines:
            engine.publish_index("reborn", f"{name}:7000")
        await self.hosts[name].restart()

    def sources(self):
        """Where prefill was last told to ask."""
        legs = [leg for name, engine in self.engines.items() if "prefill" in name for leg in engine.prefilled]
        return [leg.ours["sources"] for leg in legs]


@pytest.fixture
async def start(anyio_backend):
    """A function that starts so many engines of each role, and a router that waits so long for each."""
    async with contextlib.AsyncExitStack() as stack:

        async def _start(prefill, decode, patience_s):
            engines = {
                f"{role}-{number}": FakeEngine(f"{role}-{number}", echo=True)
                for role, count in (("prefill", prefill), ("decode", decode))
                for number in range(count)
            }
            hosts = {name: Host(engine) for name, engine in engines.items()}
            for name, host in hosts.items():
                if name.startswith("decode"):
                    engines[name].publish_index("first", f"{name}:7000")
                await host.start()
                stack.push_async_callback(host.close)
            settings = RouterSettings(
                prefill=tuple(host.url for name, host in hosts.items() if "prefill" in name),
                decode=tuple(host.url for name, host in hosts.items() if "decode" in name),
                probe_interval_s=600.0,
                probe_failures=1,
                prefill_timeout_s=patience_s,
                first_byte_timeout_s=patience_s,
                decode_timeout_s=patience_s,
            )
            app = create_app(settings)
            (url,) = await stack.enter_async_context(serving(app, lifespan="on"))
            client = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=40.0))
            return Cluster(engines, hosts, app, client)

        yield _start


def contents_of(answer):
    """The answer's text, and the errors that the client was shown."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        body = answer.json()
        return ("", [body["error"]]) if "error" in body else (body["choices"][0]["message"]["content"], [])
    lines = [line[6:] for line in answer.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    errors = [event["error"] for event in events if "error" in event]
    assert (lines[-1] == "[DONE]") == (not errors), "a stream ends well or with an error"
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events if "choices" in event]
    return "".join(deltas), errors


def right(*contents):
    """What an engine answers to a chat that ends with these messages."""
    return echo_of({"messages": [{"content": content} for content in contents]})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("others", [0, 1], ids=["the only one", "one of two"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_fault(start, leg, fault, others, stream):
    """The right answer or one clear error; then the next turn is right, and reads back from where it should."""
    cluster = await start(
        prefill=1 + others * (leg == "prefill"),
        decode=1 + others * (leg == "decode"),
        # Only a hang is waited for: a busy machine must not make one of a healthy leg.
        patience_s=0.5 if fault == "hangs" else 30.0,
    )
    first = await cluster.turn("one", stream=stream)
    key = first.headers["x-bidikv-session"]
    before = cluster.known(key)
    cluster.arm(f"{leg}-0", fault)
    if fault == "refuses the connection":
        await cluster.hosts[f"{leg}-0"].die()
    prompt = ("one", right("one"), "two")

    answer = await cluster.turn(*prompt, stream=stream)

    seen_some = leg == "decode" and fault == "dies in mid answer" and stream
    hopeless = leg == "decode" and not others and fault in ERRORS
    text, errors = contents_of(answer)
    if seen_some:
        assert answer.status_code == 200
        assert [error["code"] for error in errors] == ["engine_failed"]
        assert right(*prompt).startswith(text)
    elif hopeless:
        status, code = ERRORS[fault]
        assert (answer.status_code, [error["code"] for error in errors]) == (status, [code])
    else:
        assert (answer.status_code, text, errors) == (200, right(*prompt), [])
    failed = seen_some or hopeless
    after = cluster.known(key)
    assert after == before if failed else [turn.depth for turn in after] == [1, 3]

    if fault in DOWN_AFTERWARDS:
        await cluster.reborn(f"{leg}-0")
    # The answer may be there before an engine that restarts is.
    await eventually(lambda: all(host.is_up for host in cluster.hosts.values()))
    await cluster.app._prober.probe_all()
    prompt = prompt if failed else (*prompt, right(*prompt), "three")
    asked = len(cluster.sources())
    again = await cluster.turn(*prompt, stream=stream)
    assert (again.status_code, contents_of(again)) == (200, (right(*prompt), []))
    last = after[-1].holder.engine
    lost = leg == "decode" and fault in NEW_AFTERWARDS and last == cluster.hosts["decode-0"].url
    holder = next(name for name, host in cluster.hosts.items() if host.url == last)
    assert cluster.sources()[asked:] == [[] if lost else [f"{holder}:7000"]]
    assert ReuseHeader.parse(again.headers["x-bidikv-reuse"]).reason == ("decode_changed" if lost else "hit")
    assert [turn.depth for turn in cluster.known(key)] == ([1, 3] if failed else [1, 3, 5])
    for role in ("prefill", "decode"):
        health = (await cluster.client.get("/health")).json()[role]
        assert [(engine["in_flight"], engine["load"]) for engine in health] == [(0, 0)] * len(health)
