"""The side channel on real sockets: answers, bounds, and no peer that delays another."""

import errno
import socket
import threading

import pytest
import zmq

from bidikv_server.connector import side_channel
from bidikv_server.connector.side_channel import Client, Server


@pytest.fixture
def client():
    client = Client()
    yield client
    client.close()


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_asks_and_is_answered(client):
    """A request's reply reaches its own future, whatever the order."""
    server = Server(free_address(), lambda data: data[::-1])
    try:
        futures = {n: client.submit(server.address, b"%d!" % n, timeout_s=10) for n in range(50)}
        assert all(future.result(10) == (b"%d!" % n)[::-1] for n, future in futures.items())
    finally:
        server.close()


def test_a_silent_peer_times_out_and_delays_nobody(client):
    """One peer that never answers costs its own requests only."""
    silent, lively = Server(free_address(), lambda _: None), Server(free_address(), lambda data: data)
    try:
        stuck = client.submit(silent.address, b"x", timeout_s=0.3)
        assert client.submit(lively.address, b"y", timeout_s=10).result(10) == b"y"
        assert not stuck.done()
        with pytest.raises(TimeoutError, match="did not answer"):
            stuck.result(10)
    finally:
        silent.close()
        lively.close()


def test_a_peer_that_is_not_there_times_out(client):
    """A lookup is bounded even when nothing listens."""
    with pytest.raises(TimeoutError):
        client.submit(free_address(), b"x", timeout_s=0.2).result(10)


def test_requests_to_a_dead_peer_are_not_delivered_to_its_successor(client):
    """Whoever binds the port after a timeout sees only new requests."""
    address = free_address()
    with pytest.raises(TimeoutError):
        client.submit(address, b"old", timeout_s=0.2).result(10)
    seen = []
    server = Server(address, lambda data: seen.append(data) or data)
    try:
        assert client.submit(address, b"new", timeout_s=10).result(10) == b"new"
        assert seen == [b"new"]
    finally:
        server.close()


def test_malformed_addresses_are_an_error_of_that_request(client):
    """An address that cannot be parsed fails its own future, and the client goes on."""
    with pytest.raises(OSError, match="nonsense"):
        client.submit("nonsense", b"x", timeout_s=1).result(10)
    with pytest.raises((OSError, TimeoutError)):
        client.submit("127.0.0.1:notaport", b"x", timeout_s=0.2).result(10)


def test_frames_that_are_not_requests_are_ignored():
    """Raw clients that speak something else do not stop the server."""
    server = Server(free_address(), lambda data: data)
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{server.address}")
        stranger.send(b"one frame")
        stranger.send_multipart([b"1", b"2", b"3", b"4"])
        stranger.send_multipart([b"id", b"", b"real"])
        assert stranger.recv_multipart() == [b"id", b"", b"real"]
        stranger.close()
    finally:
        context.term()
        server.close()


@pytest.mark.parametrize(("theirs", "ours"), [("", "secret"), ("other", "secret"), ("secret", "")])
def test_peers_without_the_secret_are_not_heard(theirs, ours):
    """Neither a stranger's question nor a stranger's answer is read."""
    seen = []
    server = Server(free_address(), lambda data: seen.append(data) or data, secret=theirs)
    client = Client(secret=ours)
    try:
        with pytest.raises(TimeoutError):
            client.submit(server.address, b"x", timeout_s=0.3).result(10)
        assert seen == []
    finally:
        client.close()
        server.close()


def test_peers_with_the_secret_understand_each_other():
    """The seal is over the correlation id too, so an answer fits one question."""
    server = Server(free_address(), lambda data: data, secret="s")
    client = Client(secret="s")
    try:
        assert client.submit(server.address, b"x", timeout_s=10).result(10) == b"x"
    finally:
        client.close()
        server.close()


def test_a_taken_port_names_the_fix():
    """Two indexes on one port end with one clear message."""
    server = Server(free_address(), lambda data: data)
    try:
        with pytest.raises(OSError, match="--index-port"):
            Server(server.address, lambda data: data)
    finally:
        server.close()


def test_closing_ends_what_is_under_way_and_all_threads():
    """Nothing outlives the client."""
    client, silent = Client(), Server(free_address(), lambda _: None)
    stuck = client.submit(silent.address, b"x", timeout_s=60)
    client.close()
    client.close()
    silent.close()
    with pytest.raises(TimeoutError, match="closed"):
        stuck.result(1)
    assert not [t for t in threading.enumerate() if t.name.startswith("bidikv")]


@pytest.fixture
def late(monkeypatch):
    """I/O threads begin only once this is set."""
    gate = threading.Event()

    class Late(side_channel._Exchange):
        def __init__(self, *arguments):
            assert gate.wait(30)
            super().__init__(*arguments)

    monkeypatch.setattr(side_channel, "_Exchange", Late)
    yield gate
    gate.set()


def test_a_question_before_the_thread_has_begun_is_asked(late):
    """Nobody has to ask again for it to be heard."""
    server, client = Server(free_address(), lambda data: data), Client()
    try:
        asked = client.submit(server.address, b"early", timeout_s=20)
        late.set()
        assert asked.result(10) == b"early"
    finally:
        client.close()
        server.close()


def test_closing_before_the_thread_has_begun_ends_it(late):
    """The thread finds out without being told again."""
    client = Client()
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    while client._outbox.empty():
        assert closing.is_alive()
    late.set()
    closing.join(10)
    assert not closing.is_alive()


def test_running_out_of_descriptors_is_one_requests_loss(client, monkeypatch):
    """What fails while a question is sent fails that question; the thread answers the next one."""
    server = Server(free_address(), lambda data: data)
    try:
        real = side_channel._socket

        def none_left(context, kind):
            raise zmq.ZMQError(errno.EMFILE)

        monkeypatch.setattr(side_channel, "_socket", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            client.submit(server.address, b"x", timeout_s=5).result(10)
        monkeypatch.setattr(side_channel, "_socket", real)
        assert client.submit(server.address, b"y", timeout_s=10).result(10) == b"y"
    finally:
        server.close()


def test_a_dead_thread_refuses_instead_of_blocking(client, caplog):
    """The engine's thread is told at once, however the I/O thread ended, and what was under way ends."""
    silent = Server(free_address(), lambda _: None)
    try:
        stuck = client.submit(silent.address, b"x", timeout_s=60)
        client._outbox.put(("not", "an", "item"))
        client._ring()
        with pytest.raises(TimeoutError):
            stuck.result(10)
        client._thread.join(10)
        with pytest.raises(OSError, match="closed"):
            client.submit(silent.address, b"x", timeout_s=60).result(1)
    finally:
        silent.close()
    assert "side channel stopped" in caplog.text


def test_a_handler_that_fails_costs_one_answer(client, caplog):
    """The server goes on."""
    server = Server(free_address(), lambda data: data if data == b"good" else 1 // 0)
    try:
        bad = client.submit(server.address, b"bad", timeout_s=0.3)
        assert client.submit(server.address, b"good", timeout_s=10).result(10) == b"good"
        with pytest.raises(TimeoutError):
            bad.result(10)
    finally:
        server.close()
    assert "could not be answered" in caplog.text


def test_a_time_out_does_not_cost_others_their_answer(client):
    """A peer that is slow for one question keeps the answers to the others."""
    slow = threading.Event()
    server = Server(free_address(), lambda data: (slow.wait(10) and data) if data == b"first" else data)
    try:
        first = client.submit(server.address, b"first", timeout_s=0.2)
        second = client.submit(server.address, b"second", timeout_s=20)
        with pytest.raises(TimeoutError):
            first.result(10)
        slow.set()
        assert second.result(10) == b"second"
    finally:
        server.close()


def test_a_tidying_that_fails_costs_no_answer(client, caplog):
    """What the server does between messages may fail; it is told, and messages are answered."""

    def idle():
        raise RuntimeError("untidy")

    server = Server(free_address(), lambda data: data, idle=idle)
    try:
        assert client.submit(server.address, b"x", timeout_s=10).result() == b"x"
    finally:
        server.close()
    assert "tidied" in caplog.text
