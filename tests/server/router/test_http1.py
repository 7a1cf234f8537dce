"""HTTP/1.1 with a server that sends exactly the bytes a test says."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest
from fake_engine import eventually

from bidikv_server.router.http1 import ConnectionBroke, Origin, request_head
from bidikv_server.router.pool import ConnectFailed, Pool

pytestmark = pytest.mark.anyio
WAIT = b"wait"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-One: 1\r\n\r\n"


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


class Script:
    """A server that reads one request per step, and then writes what the step says.

    Attributes:
        steps: Pieces to write; WAIT in their place waits for `more`.
        closes: Hang up after the last step.
        more: Lets a waiting step go on.
        gone: Set when the peer has hung up first.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[bytes, ...]] = []
        self.closes = False
        self.connections = 0
        self.requests: list[bytes] = []
        self.more = asyncio.Event()
        self.gone = asyncio.Event()
        self.serving: list[asyncio.Task] = []

    async def serve(self, reader, writer) -> None:
        self.serving.append(asyncio.current_task())
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not (self.closes and not self.steps):
                await self.step(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def step(self, reader, writer) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
            raise
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        self.requests.append(head + await reader.readexactly(length))
        for piece in self.steps.pop(0):
            if piece == WAIT:
                await self.wait(reader)
            else:
                writer.write(piece)
                await writer.drain()

    async def wait(self, reader) -> None:
        left = asyncio.ensure_future(reader.read(1))
        more = asyncio.ensure_future(self.more.wait())
        await asyncio.wait((left, more), return_when=asyncio.FIRST_COMPLETED)
        is_gone = left.done()
        for task in (left, more):
            task.cancel()
        await asyncio.gather(left, more, return_exceptions=True)
        if is_gone:
            self.gone.set()
            raise ConnectionAbortedError


@pytest.fixture
async def engine(anyio_backend):
    """A scripted server, its origin, and a pool to reach it."""
    script = Script()
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    origin = Origin.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    pool = Pool(connect_timeout_s=5.0, idle_s=30.0)
    yield script, origin, pool
    pool.close()
    server.close()
    await asyncio.gather(*script.serving)


async def ask(pool, origin, body=b"{}"):
    connection = await pool.take(origin)
    try:
        connection.start(request_head("POST", "/v1/x", origin, {"A": "b"}, len(body)), body)
        status, headers = await connection.head()
        pieces = []
        while piece := await connection.read():
            pieces.append(piece)
        return status, headers, b"".join(pieces)
    finally:
        pool.give_back(origin, connection)


async def begun(pool, origin, within_s=math.inf):
    """A connection whose answer has begun; all of it has to come within so many seconds."""
    connection = await pool.take(origin)
    deadline_s = asyncio.get_running_loop().time() + within_s
    connection.start(request_head("POST", "/", origin, {}, 0), b"", deadline_s)
    await connection.head()
    return connection


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX-One: 1\r\n\r\nbo", b"dy"), b"body"),
        ((CHUNKED, b"2\r\nbo\r\n2", b"\r\ndy\r\n0\r\n\r\n"), b"body"),
        (tuple(bytes([byte]) for byte in CHUNKED + b"4\r\nbody\r\n0\r\n\r\n"), b"body"),
        ((b"HTTP/1.1 100 Continue\r\nX-No: 1\r\n\r\n" + CHUNKED + b"4\r\nbody\r\n0\r\n\r\n",), b"body"),
        ((b"HTTP/1.1 204 No Content\r\nX-One: 1\r\n\r\n",), b""),
    ],
)
async def test_answers(engine, pieces, body):
    """An answer is whole however it is framed and cut, and its connection serves the next request."""
    script, origin, pool = engine
    script.steps += [pieces, pieces]
    for _ in range(2):
        status, headers, read = await ask(pool, origin)
        assert (status // 100, read) == (2, body)
        assert (b"x-one", b"1") in headers
        assert b"x-no" not in dict(headers)
    assert script.connections == 1
    head = f"POST /v1/x HTTP/1.1\r\nHost: {origin.authority}\r\nA: b\r\nContent-Length: 2\r\n\r\n{{}}"
    assert script.requests == [head.encode()] * 2


async def test_an_answer_may_end_with_its_connection(engine):
    """Without a length the end of the connection is the end of the answer, and the connection is not used again."""
    script, origin, pool = engine
    script.closes = True
    script.steps.append((b"HTTP/1.1 200 OK\r\n\r\nall of it",))
    assert (await ask(pool, origin))[2] == b"all of it"
    script.steps.append((b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",))
    assert (await ask(pool, origin))[2] == b"x"
    assert script.connections == 2


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((), "closed"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbo",), "closed"),
        ((CHUNKED, b"2\r\nbo\r\n"), "closed"),
        ((b"SSH-2.0-OpenSSH\r\n",), "not HTTP"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",), "HTTP|closed"),
        ((b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000 + b"\r\n\r\n",), "HTTP"),
        ((CHUNKED, b"zz\r\n"), "not HTTP"),
    ],
)
async def test_broken_answers(engine, pieces, words):
    """What breaks off or is no HTTP is an error, and never an answer."""
    script, origin, pool = engine
    script.closes = True
    script.steps.append(pieces)
    with pytest.raises(ConnectionBroke, match=words):
        await ask(pool, origin)


@pytest.mark.parametrize("late", [False, True])
async def test_an_answer_nobody_asked_for(engine, late):
    """A second answer never becomes the next request's: its connection is not used again."""
    script, origin, pool = engine
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"
    script.steps.append((good + b"1", WAIT, good + b"2") if late else (good + b"1" + good + b"2",))
    if late:
        assert (await ask(pool, origin))[2] == b"1"
        script.more.set()
    else:
        with pytest.raises(ConnectionBroke):
            await ask(pool, origin)
    script.steps.append((good + b"3",))
    while True:
        with contextlib.suppress(ConnectionBroke):
            read = (await ask(pool, origin))[2]
            break
    assert read == b"3"
    assert script.connections == 2


async def test_silence(engine):
    """A read that waits too long fails; one that gets something in time does not."""
    script, origin, pool = engine
    script.steps.append((CHUNKED, b"1\r\na\r\n", WAIT))
    connection = await begun(pool, origin)
    connection.give_up_after(0.05)
    assert await connection.read() == b"a"
    with pytest.raises(TimeoutError):
        await connection.read()
    pool.give_back(origin, connection)
    await asyncio.wait_for(script.gone.wait(), 5)


async def test_a_deadline(engine):
    """It holds for the whole answer, also when something comes after it."""
    script, origin, pool = engine
    script.steps.append((CHUNKED, WAIT, b"1\r\na\r\n", WAIT))
    connection = await begun(pool, origin, within_s=0.05)
    with pytest.raises(TimeoutError):
        await connection.read()
    script.more.set()
    await eventually(lambda: connection._chunks)
    assert await connection.read() == b"a"
    with pytest.raises(TimeoutError):
        await connection.read()
    pool.give_back(origin, connection)
    await asyncio.wait_for(script.gone.wait(), 5)


async def test_one_timer_for_everything(engine):
    """A connection that rested, and was taken again before its time, outlives that time; then it rests anew."""
    script, origin, _ = engine
    pool = Pool(connect_timeout_s=5.0, idle_s=0.05)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
    script.steps += [(answer,), (CHUNKED, WAIT, b"1\r\na\r\n0\r\n\r\n"), (answer,)]
    loop = asyncio.get_running_loop()
    assert (await ask(pool, origin))[2] == b"x"
    connection = await begun(pool, origin, within_s=30.0)
    ends_s = loop.time() + 0.2
    await eventually(lambda: loop.time() > ends_s)
    assert not script.gone.is_set()
    connection.give_up_after(30.0)
    script.more.set()
    assert await connection.read() == b"a"
    assert await connection.read() == b""
    pool.give_back(origin, connection)
    assert (await ask(pool, origin))[2] == b"x"
    assert script.connections == 1
    await asyncio.wait_for(script.gone.wait(), 5)
    assert not pool._idle[origin]
    pool.close()


async def test_leaving_early_closes(engine):
    """An answer that is not read to its end takes its connection with it: the engine shall stop."""
    script, origin, pool = engine
    script.steps.append((CHUNKED, b"1\r\na\r\n", WAIT))
    connection = await begun(pool, origin)
    pool.give_back(origin, connection)
    await asyncio.wait_for(script.gone.wait(), 5)


@pytest.mark.parametrize(
    "answer",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret",),
        (CHUNKED + b"6\r\nsecret\r\n0\r\n\r\n",),
        (CHUNKED, WAIT, b"6\r\nsecret\r\n0\r\n\r\n"),
    ],
)
async def test_what_nobody_read_is_nobody_elses(engine, answer):
    """An answer that has come whole, but whose reader left before reading it, is never part of the next one."""
    script, origin, pool = engine
    script.steps += [answer, (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nown",)]
    connection = await begun(pool, origin)
    script.more.set()
    await eventually(lambda: connection._complete)
    pool.give_back(origin, connection)
    assert (await ask(pool, origin))[2] == b"own"
    assert script.connections == 2


async def test_a_slow_reader_slows_the_engine(engine):
    """What waits for its reader is bounded, and all of it arrives."""
    script, origin, pool = engine
    data = b"x" * 2**16
    script.steps.append((CHUNKED, *[b"10000\r\n" + data + b"\r\n"] * 400, b"0\r\n\r\n"))
    connection = await begun(pool, origin)
    size, largest = 0, 0
    while piece := await connection.read():
        size, largest = size + len(piece), max(largest, len(piece))
        await asyncio.sleep(0)
    pool.give_back(origin, connection)
    assert size == 400 * 2**16
    assert largest < 2**20  # the high water and one read of the transport


async def test_idle_connections_are_closed(engine):
    """After their time, so that no request is sent into a connection that the engine is closing."""
    script, origin, _ = engine
    pool = Pool(connect_timeout_s=5.0, idle_s=0.01)
    script.steps.append((b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",))
    assert (await ask(pool, origin))[2] == b"x"
    await asyncio.wait_for(script.gone.wait(), 5)
    pool.close()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://no-such-host.invalid:80", f"http://{'a' * 70}:80"]
)
async def test_no_connection(url):
    """A server that is not there, or a name that is none, is one error."""
    pool = Pool(connect_timeout_s=5.0, idle_s=30.0)
    with pytest.raises(ConnectFailed):
        await pool.take(Origin.of(url))


async def test_closing_the_pool_ends_everything(engine):
    """A read that waits ends, too."""
    script, origin, pool = engine
    script.steps.append((CHUNKED, WAIT))
    asking = asyncio.ensure_future(ask(pool, origin))
    await eventually(lambda: script.requests)
    pool.close()
    with pytest.raises(ConnectionBroke):
        await asking


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nb", "a\rb", "a\0b"])
def test_no_header_begins_another_line(value):
    """A value that would is refused."""
    with pytest.raises(ValueError, match="line end"):
        request_head("GET", "/", Origin.of("http://h"), {"A": value}, 0)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h", Origin("h", 80, "h", is_tls=False)),
        ("https://h", Origin("h", 443, "h", is_tls=True)),
        ("http://[::1]:81", Origin("::1", 81, "[::1]:81", is_tls=False)),
    ],
)
def test_origins(url, origin):
    """Where a base URL leads."""
    assert Origin.of(url) == origin
