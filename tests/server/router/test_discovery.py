"""Engines that come and go while the router runs: by file and by DNS, with real files and a real name server."""

import asyncio
import contextlib
import json
import os
import socket
import time

import httpx2
import pytest
from fake_engine import FakeEngine, eventually, serving
from name_server import name_server

from bidikv_server.router.app import create_app
from bidikv_server.router.core.discovery import Lookup
from bidikv_server.router.core.engines import Role
from bidikv_server.router.engines_file import EnginesFile
from bidikv_server.router.resolver import LookupFailed, Resolver
from bidikv_server.router.settings import RouterSettings, SettingsError

pytestmark = pytest.mark.anyio


class Site:
    """A router whose engines a test starts and stops by itself, with the clock in the test's hand."""

    def __init__(self, stack, app, client):
        self.stack, self.app, self.client = stack, app, client
        self.now_s = time.monotonic()
        app._discovery._clock = lambda: self.now_s

    async def look(self, *, passes_s: float = 10.0) -> None:
        self.now_s += passes_s
        await self.app._discovery.look()

    def listed(self, role=Role.DECODE):
        return [engine.url for engine in self.app.engines.snapshots(role) if not engine.leaving]

    def known(self, role=Role.DECODE):
        return [engine.url for engine in self.app.engines.snapshots(role)]

    async def chat(self, *contents, session="s"):
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": content}
            for number, content in enumerate(contents)
        ]
        body = {"model": "m", "messages": messages}
        return await self.client.post("/v1/chat/completions", json=body, headers={"X-Session-ID": session})

    async def ready(self):
        return (await self.client.get("/ready")).status_code


@pytest.fixture
async def site(anyio_backend):
    """A function that starts a router with these settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def _site(**settings) -> Site:
            app = create_app(RouterSettings(**{"probe_interval_s": 600.0, "probe_failures": 1, **settings}))
            (url,) = await stack.enter_async_context(serving(app, lifespan="on"))
            client = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=10.0))
            return Site(stack, app, client)

        yield _site


@pytest.fixture
async def engines(anyio_backend):
    """Two prefill and two decode engines with indexes, and their URLs."""
    made = [FakeEngine(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    for number, engine in enumerate(made[2:]):
        engine.publish_index(f"id-{number}", f"10.0.0.{number}:7000")
    async with serving(*made) as urls:
        yield made, urls


@pytest.fixture
async def dns(anyio_backend):
    async with name_server() as server:
        yield server


@pytest.fixture
def engines_file(tmp_path):
    """A function that writes the file anew, so that its stamp changes."""
    steps = iter(range(1, 1000))

    def write(prefill, decode, *, name="engines.toml", text=None):
        path = tmp_path / name
        lists = {"prefill": prefill, "decode": decode}
        as_toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lists.items())
        path.write_text(text if text is not None else json.dumps(lists) if name.endswith("json") else as_toml)
        step = next(steps)
        os.utime(path, (step, step))
        return path

    return write


@pytest.mark.parametrize("name", ["engines.toml", "engines.json"])
async def test_engines_from_a_file(site, engines, engines_file, name):
    """They are read at start, and again when the file changes: a new one serves as soon as the file names it."""
    made, (prefill, other, decode, late) = engines
    path = engines_file([prefill], [decode], name=name)
    cluster = await site(engines_file=path)
    assert (cluster.listed(Role.PREFILL), cluster.listed()) == ([prefill], [decode])
    assert (await cluster.chat("hi")).status_code == 200
    engines_file([prefill, other], [late], name=name)
    await cluster.look()
    assert (cluster.listed(Role.PREFILL), cluster.listed()) == ([prefill, other], [late])
    assert (await cluster.chat("hi", session="new")).status_code == 200
    assert [len(engine.answered) for engine in made[2:]] == [1, 1]


async def test_the_file_is_watched(site, engines, engines_file):
    """Without anybody's asking."""
    _, (prefill, _, decode, late) = engines
    path = engines_file([prefill], [decode])
    cluster = await site(engines_file=path)
    engines_file([prefill], [decode, late])
    await eventually(lambda: cluster.listed() == [decode, late])
    await eventually(lambda: all(engine.healthy for engine in cluster.app.engines.snapshots(Role.DECODE)))


async def test_a_conversation_leaves_a_removed_engine(site, engines, engines_file):
    """It is read back from there once more, lives elsewhere from then on, and its leg there is not cut."""
    made, (prefill, _, decode, late) = engines
    path = engines_file([prefill], [decode])
    cluster = await site(engines_file=path)
    await cluster.chat("hi")
    made[2].gate = asyncio.Event()
    running = asyncio.ensure_future(cluster.chat("hi", session="other"))
    await eventually(lambda: len(made[2].answered) == 2)
    engines_file([prefill], [late])
    await cluster.look()
    assert (cluster.known(), cluster.listed()) == ([decode, late], [late])
    health = (await cluster.client.get("/health")).json()
    assert [(e["url"], e["leaving"], e["in_flight"]) for e in health["decode"]] == [
        (decode, True, 1),
        (late, False, 0),
    ]
    moved = await cluster.chat("hi", "Hello", "more")
    assert 'reason="hit"' in moved.headers["x-bidikv-reuse"]
    assert made[0].prefilled[-1].ours["sources"] == ["10.0.0.0:7000"]
    assert len(made[3].answered) == 1
    await cluster.look(passes_s=10_000.0)
    assert not running.done()
    made[2].gate.set()
    assert (await running).status_code == 200
    again = await cluster.chat("hi", "Hello", "more", "Hello", "and more")
    assert made[0].prefilled[-1].ours["sources"] == ["10.0.0.1:7000"]
    assert again.status_code == 200
    await cluster.look()
    assert cluster.known() == [decode, late]
    await cluster.look(passes_s=480.0)
    assert cluster.known() == [late]
    assert f'engine="{decode}"' not in (await cluster.client.get("/metrics")).text


async def test_what_a_forgotten_engine_held_is_lost(site, engines, engines_file):
    """A removed engine that is gone as well: the next turn says so and is answered all the same."""
    made, (prefill, _, decode, late) = engines
    path = engines_file([prefill], [decode])
    cluster = await site(engines_file=path)
    await cluster.chat("hi")
    made[2].healthy = False
    engines_file([prefill], [late])
    await cluster.look()
    await cluster.app._prober.probe_all()
    await cluster.look()
    assert cluster.known() == [late]
    made[0].account = None
    answer = await cluster.chat("hi", "Hello", "more")
    assert answer.status_code == 200
    assert 'reason="decode_changed"' in answer.headers["x-bidikv-reuse"]


async def test_a_turn_on_its_way_keeps_its_engine(site, engines, engines_file):
    """Prefill takes its time; the decode engine that was chosen goes meanwhile and still answers before it is forgotten."""
    made, (prefill, _, decode, late) = engines
    path = engines_file([prefill], [decode])
    cluster = await site(engines_file=path)
    made[0].gate = asyncio.Event()
    running = asyncio.ensure_future(cluster.chat("hi"))
    await eventually(lambda: made[0].prefilled)
    engines_file([prefill], [late])
    await cluster.look()
    await cluster.look(passes_s=10_000.0)
    assert cluster.known() == [decode, late]
    made[0].gate.set()
    assert (await running).status_code == 200
    assert len(made[2].answered) == 1
    await cluster.look()
    await cluster.look(passes_s=480.0)
    assert cluster.known() == [late]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("engines.toml", "prefill = [", "is not valid TOML"),
        ("engines.json", "{", "is not valid JSON"),
        ("engines.json", "[" * 100_000, "is not valid JSON"),
        ("engines.json", "[]", "must be an object with the keys prefill and decode"),
        ("engines.toml", 'prefil = ["http://p:1"]', "prefil: unknown setting"),
        ("engines.toml", 'prefill = "http://p:1"', "prefill: must be a list of engines"),
        ("engines.toml", "decode = [1]", "decode: must be a list of engines"),
        ("engines.toml", 'decode = ["http://d:1/v1"]', "decode: 'http://d:1/v1' is not an engine's base URL"),
        ("engines.toml", 'decode = ["dns://d"]', "decode: 'dns://d' has no port"),
        ("engines.toml", 'decode = ["http://d:1", "http://d:1/"]', "decode: an engine is listed twice"),
        ("engines.toml", "", "list no engine at all"),
        ("missing.toml", None, "cannot read"),
    ],
)
async def test_a_bad_file(engines_file, tmp_path, caplog, *, name, text, message):
    """At start an error, later one line in the log and the earlier engines; setting, path and key are named."""
    path = tmp_path / name
    if text is not None:
        engines_file([], [], name=name, text=text)
    with pytest.raises(SettingsError) as caught:
        EnginesFile(path)
    assert str(caught.value).startswith("engines_file: ")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    engines_file(["http://p:1"], ["http://d:1"], name=name)
    file = EnginesFile(path)
    before = file.listed
    if text is None:
        path.unlink()
    else:
        engines_file([], [], name=name, text=text)
    assert not file.read_again()
    assert not file.read_again()
    assert file.listed == before
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("engines_file changed and cannot be used, its earlier engines stay: ")
    assert message in line
    assert "\n" not in line


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_engines_from_dns(site, dns):
    """Pods of a headless service: they come and go with the name's addresses, all on one port."""
    made = [FakeEngine(f"decode-{number}") for number in range(2)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with at_addresses(made, port), serving(FakeEngine("prefill")) as (prefill,):
        dns.records["decode.test.", "A"] = ["127.0.0.1"]
        cluster = await site(
            prefill=(prefill,), decode=(f"dns://decode.test:{port}",), dns_server=dns.address
        )
        first, second = f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}"
        assert cluster.listed() == [first]
        assert await cluster.ready() == 200
        dns.records["decode.test.", "A"] = ["127.0.0.2", "127.0.0.1"]
        await cluster.look()
        assert cluster.listed() == [first, second]
        assert [engine.healthy for engine in cluster.app.engines.snapshots(Role.DECODE)] == [True, True]
        dns.records["decode.test.", "A"] = ["127.0.0.2"]
        await cluster.look()
        assert cluster.listed() == [second]
        assert (await cluster.chat("hi")).status_code == 200
        assert [len(engine.answered) for engine in made] == [0, 1]


@contextlib.asynccontextmanager
async def at_addresses(engines, port):
    """Serve each engine at an address of its own, 127.0.0.1, 127.0.0.2, ..., on one port."""
    async with contextlib.AsyncExitStack() as stack:
        for number, engine in enumerate(engines, 1):
            await stack.enter_async_context(serving(engine, host=f"127.0.0.{number}", port=port))
        yield


async def test_dns_is_asked_again_after_the_interval(site, engines, dns):
    """And not before; a name of a changed file is asked for at once."""
    _, (prefill, *_) = engines
    dns.records["decode.test.", "A"] = ["127.0.0.1"]
    cluster = await site(
        prefill=(prefill,), decode=("dns://decode.test:1",), dns_server=dns.address, dns_interval_s=5
    )
    cluster.app._discovery._asked_s = {Lookup("decode.test", 1): cluster.now_s}
    dns.asked.clear()
    await cluster.look(passes_s=4.9)
    assert dns.asked == []
    await cluster.look(passes_s=0.2)
    assert dns.asked == [("decode.test.", "A")]


async def test_a_name_server_that_fails_changes_nothing(site, engines, dns, caplog):
    """One line when it begins and one when it ends; its engines go on serving."""
    _, (prefill, _, decode, _) = engines
    dns.records["decode.test.", "A"] = ["127.0.0.1"]
    names = (f"dns://decode.test:{port_of(decode)}",)
    cluster = await site(prefill=(prefill,), decode=names, dns_server=dns.address)
    caplog.set_level("INFO")
    dns.failing = True
    for _ in range(3):
        await cluster.look()
    assert cluster.listed() == [f"http://127.0.0.1:{port_of(decode)}"]
    assert (await cluster.chat("hi")).status_code == 200
    dns.failing = False
    await cluster.look()
    assert caplog.text.count("cannot be looked up, its engines stay") == 1
    assert caplog.text.count("can be looked up again") == 1


async def test_a_name_without_engines(site, engines, dns, caplog):
    """No such name or no address: engines that answer stay, those that are down go, and one line says so."""
    made, (prefill, _, decode, _) = engines
    dns.records["decode.test.", "A"] = ["127.0.0.1"]
    names = (f"dns://decode.test:{port_of(decode)}",)
    cluster = await site(prefill=(prefill,), decode=names, dns_server=dns.address)
    for records in ({}, {("decode.test.", "TXT"): ["x"]}):
        dns.records = records
        await cluster.look()
        assert len(cluster.listed()) == 1
    assert caplog.text.count("names no engine; 1 that still answer stay") == 1
    made[2].healthy = False
    await cluster.app._prober.probe_all()
    await cluster.look()
    assert cluster.known() == []
    assert await cluster.ready() == 503


async def test_services_by_srv(dns):
    """Host and port of each target; AAAA where there is no A; TLS where the entry says so."""
    dns.records["_http._tcp.decode.test.", "SRV"] = ["0 0 8201 decode-1.test.", "9 0 8200 decode-0.test."]
    dns.records["six.test.", "AAAA"] = ["fd00::2", "fd00::1"]
    dns.records["both.test.", "AAAA"] = ["fd00::1"]
    dns.records["both.test.", "A"] = ["10.0.0.1"]
    host, port = dns.address.split(":")
    resolver = Resolver((host, int(port)))
    assert await resolver.find(Lookup("_http._tcp.decode.test", None)) == (
        "http://decode-0.test:8200",
        "http://decode-1.test:8201",
    )
    assert await resolver.find(Lookup("six.test", 1, "https")) == (
        "https://[fd00::1]:1",
        "https://[fd00::2]:1",
    )
    assert await resolver.find(Lookup("both.test", 1)) == ("http://10.0.0.1:1",)
    assert await resolver.find(Lookup("none.test", 1)) == ()


async def test_a_silent_name_server(dns, monkeypatch):
    """Is waited for only so long."""
    monkeypatch.setattr("bidikv_server.router.resolver._LIFETIME_S", 0.2)
    dns.silent = True
    host, port = dns.address.split(":")
    with pytest.raises(LookupFailed, match=r"no name server answered within 0\.2 s"):
        await Resolver((host, int(port))).find(Lookup("decode.test", 1))


async def test_a_router_without_engines_waits_for_them(site, dns):
    """It starts, says that it is not ready, refuses turns with a hint, and serves when engines come."""
    names = {role: f"dns://_http._tcp.{role}.test" for role in ("prefill", "decode")}
    cluster = await site(prefill=(names["prefill"],), decode=(names["decode"],), dns_server=dns.address)
    assert (await cluster.client.get("/live")).status_code == 200
    ready = await cluster.client.get("/ready")
    assert (ready.status_code, ready.json()["missing"]) == (503, ["prefill", "decode"])
    refused = await cluster.chat("hi")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    async with serving(FakeEngine("prefill"), FakeEngine("decode")) as urls:
        for name, url in zip(("prefill", "decode"), urls, strict=True):
            dns.records[f"_http._tcp.{name}.test.", "SRV"] = [f"0 0 {port_of(url)} localhost."]
        await cluster.look()
        assert await cluster.ready() == 200
        assert (await cluster.chat("hi")).status_code == 200
