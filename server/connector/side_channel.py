"""The only ZeroMQ user: a request/reply server on its own thread, and a client that never blocks its caller.

A message is three frames: correlation id, seal, body. With a shared secret the seal is an HMAC over the other two, and
what does not carry it is dropped unread; without one it is empty.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import logging
import threading
import time
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from socket import socketpair
from typing import TYPE_CHECKING, Final

import zmq

from bidikv_server.connector.messages import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket as NativeSocket  # noqa: N812  # a ZeroMQ socket is what the others here are

logger = logging.getLogger("vllm.bidikv")

_STOP_POLL_MS: Final = 500
_UNREAD_MESSAGES: Final = 16
_LONGEST_POLL_MS: Final = 60_000
"""ZeroMQ takes a C int; a caller may have any timeout."""


def _seal(secret: bytes, correlation: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, correlation + body, "sha256") if secret else b""


def _opened(secret: bytes, frames: list[bytes]) -> tuple[bytes, bytes] | None:
    """Correlation id and body of a message; None if it has another form or another seal."""
    if len(frames) != 3:
        return None
    correlation, seal, body = frames
    return (correlation, body) if hmac.compare_digest(seal, _seal(secret, correlation, body)) else None


def _endpoint(address: str) -> str:
    return f"tcp://{address}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    # A peer that sends more than any message of ours may be is disconnected before it costs memory.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # What waits unread is not authenticated yet. A peer's own queue holds the rest of a burst.
    socket.setsockopt(zmq.RCVHWM, _UNREAD_MESSAGES)
    return socket


class Server:
    """Answers requests on one thread. `handle` runs on that thread and must return quickly; None means no answer.

    So does `idle`, at least twice a second and after every request.
    """

    def __init__(
        self,
        address: str,
        handle: Callable[[bytes], bytes | None],
        *,
        secret: str = "",
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind to `host:port`; with a secret, answer only peers that have it too.

        Raises:
            OSError: The address cannot be bound; the message says which and what to do.
        """
        self.address = address
        self._handle = handle
        self._idle = idle
        self._secret = secret.encode()
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        try:
            self._socket.bind(_endpoint(address))
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise OSError(
                error.errno,
                f"the retention index cannot listen on {address} ({error.strerror}): "
                "give this engine another --index-port",
            ) from error
        self._thread = threading.Thread(target=self._run, name="bidikv-index", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._idle()
            except Exception:
                # The thread's top, as below: what it does between messages must not cost a message its answer.
                logger.exception("bidikv: the retention index could not be tidied up")
            if not self._socket.poll(_STOP_POLL_MS):
                continue
            peer, *frames = self._socket.recv_multipart()
            opened = _opened(self._secret, frames)
            if opened is None:
                continue
            correlation, body = opened
            try:
                reply = self._handle(body)
            except Exception:
                # The thread's top: one message must not cost every later one its answer.
                logger.exception("bidikv: a side-channel message could not be answered")
                continue
            if reply is not None:
                self._socket.send_multipart(
                    [peer, correlation, _seal(self._secret, correlation, reply), reply]
                )
        self._socket.close()

    def close(self) -> None:
        """Stop the thread and release the port. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._context.term()


class Client:
    """Sends requests to any number of servers from one thread; a slow peer delays nobody else.

    `submit` may be called from any thread and returns at once. The future holds the reply, or TimeoutError.
    """

    def __init__(self, *, secret: str = "") -> None:
        """Start the I/O thread."""
        self._secret = secret.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outbox: SimpleQueue[tuple[str, bytes, float, Future[bytes]] | None] = SimpleQueue()
        # A ZeroMQ socket may be used by one thread only, so callers ring the I/O thread. Not over a pair of such sockets: what
        # is sent without waiting is lost until that thread has connected its end, and for a moment after.
        self._bell_lock = threading.Lock()
        self._bell, self._ear = socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bidikv-side-channel", daemon=True)
        self._thread.start()

    def submit(self, address: str, message: bytes, *, timeout_s: float) -> Future[bytes]:
        """Ask `host:port`; the future ends within `timeout_s` (plus scheduling delay) whatever the peer does."""
        future: Future[bytes] = Future()
        if self._closed or not self._thread.is_alive():
            future.set_exception(OSError(errno.EPIPE, f"side channel closed: {address} was not asked"))
            return future
        self._outbox.put((address, message, time.monotonic() + timeout_s, future))
        self._ring()
        if not self._thread.is_alive():
            # It ended meanwhile, and may have refused what was queued before this.
            _refuse_all(self._outbox)
        return future

    def close(self) -> None:
        """Stop the thread; requests under way end with TimeoutError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._outbox.put(None)
        self._ring()
        self._thread.join()
        with self._bell_lock:
            self._bell.close()
        self._context.term()

    def _ring(self) -> None:
        # A full bell has been rung already, and a closed one has nobody to hear it; the engine's thread never waits here.
        with self._bell_lock, contextlib.suppress(OSError):
            self._bell.send(b"\0")

    def _run(self) -> None:
        exchange = _Exchange(self._context, self._secret, self._ear)
        try:
            while exchange.step(self._outbox):
                pass
        except Exception:
            # The thread's top: without it every later request would only end at its caller's own deadline.
            logger.exception(
                "bidikv: the side channel stopped; no KV is reused until the engine is restarted"
            )
        finally:
            exchange.close()
            _refuse_all(self._outbox)


def _refuse_all(outbox: SimpleQueue[tuple[str, bytes, float, Future[bytes]] | None]) -> None:
    """End what was queued after the thread had stopped listening."""
    while True:
        try:
            item = outbox.get_nowait()
        except Empty:
            return
        if item is not None:
            item[3].set_exception(TimeoutError(f"side channel closed while asking {item[0]}"))


class _Exchange:
    """State of the client's I/O thread: one DEALER socket per peer, one pending entry per request."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: bytes, ear: NativeSocket) -> None:
        self._context = context
        self._secret = secret
        self._ear = ear
        self._poller = zmq.Poller()
        self._poller.register(ear, zmq.POLLIN)
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._pending: dict[bytes, tuple[float, Future[bytes], str]] = {}
        self._numbers = itertools.count()

    def step(self, outbox: SimpleQueue[tuple[str, bytes, float, Future[bytes]] | None]) -> bool:
        """Take what was submitted, wait for something to happen and act on it; False once the client was closed."""
        while True:
            try:
                item = outbox.get_nowait()
            except Empty:
                break
            if item is None:
                return False
            self._send(*item)
        for socket, _ in self._poller.poll(self._wait_ms()):
            if socket == self._ear.fileno():
                self._ear.recv(4096)
            else:
                self._receive(socket)
        self._time_out()
        return True

    def close(self) -> None:
        for _, future, address in self._pending.values():
            future.set_exception(TimeoutError(f"side channel closed while asking {address}"))
        self._ear.close()
        for peer in self._peers.values():
            peer.close()

    def _wait_ms(self) -> int | None:
        if not self._pending:
            return None
        nearest = min(deadline for deadline, _, _ in self._pending.values())
        return min(_LONGEST_POLL_MS, max(0, int((nearest - time.monotonic()) * 1000) + 1))

    def _send(self, address: str, message: bytes, deadline_s: float, future: Future[bytes]) -> None:
        correlation = next(self._numbers).to_bytes(8, "little")
        try:
            peer = self._peer(address)
            peer.send_multipart(
                [correlation, _seal(self._secret, correlation, message), message], flags=zmq.NOBLOCK
            )
        except zmq.Again:
            future.set_exception(TimeoutError(f"{address} does not take requests"))
        except (zmq.ZMQError, ValueError) as error:
            # Out of file descriptors, an address that is none: this request's loss, not the thread's.
            future.set_exception(OSError(getattr(error, "errno", errno.EINVAL), f"{address}: {error}"))
        else:
            self._pending[correlation] = (deadline_s, future, address)

    def _peer(self, address: str) -> zmq.Socket[bytes]:
        peer = self._peers.get(address)
        if peer is not None:
            return peer
        peer = _socket(self._context, zmq.DEALER)
        try:
            peer.connect(_endpoint(address))
        except (zmq.ZMQError, ValueError):
            peer.close()
            raise
        self._poller.register(peer, zmq.POLLIN)
        self._peers[address] = peer
        return peer

    def _receive(self, peer: zmq.Socket[bytes]) -> None:
        opened = _opened(self._secret, peer.recv_multipart())
        pending = self._pending.pop(opened[0], None) if opened is not None else None
        if opened is not None and pending is not None:
            pending[1].set_result(opened[1])

    def _time_out(self) -> None:
        now_s = time.monotonic()
        overdue = [item for item in self._pending.items() if item[1][0] <= now_s]
        for correlation, _ in overdue:
            del self._pending[correlation]
        waiting_for = {address for _, _, address in self._pending.values()}
        for _, (_, future, address) in overdue:
            # What is queued for a dead peer would be delivered to whoever binds its port next.
            stale = self._peers.pop(address, None) if address not in waiting_for else None
            if stale is not None:
                self._poller.unregister(stale)
                stale.close()
            future.set_exception(TimeoutError(f"{address} did not answer in time"))
