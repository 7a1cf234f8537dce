"""A fake engine that is never the bottleneck: a raw protocol on uvloop and httptools, in a process of its own.

It plays both roles. A request whose body asks for remote decode is a prefill leg; any other one is answered, with
`max_tokens` events if it streams. Every event carries the time at which it was written, on the machine's one monotonic
clock, so that a reader in another process can tell how long it was under way.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from typing import Final

import httptools
import uvloop

_PREFILL: Final = re.compile(rb'"do_remote_decode"\s*:\s*true')
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_MAX_TOKENS: Final = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_EDGE_BYTES: Final = 2048
"""Where the fields stand in the body: before the messages or after them, whoever wrote it. A prompt is not searched."""

_JSON: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_EVENTS: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_HANDLE: Final = (
    b'{"id":"p","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"x"},"finish_reason":"length"}],"usage":{"prompt_tokens":700,"completion_tokens":1,"total_tokens":701},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e",'
    b'"remote_block_ids":[[1,2,3,4,5,6,7,8]],"remote_request_id":"r","remote_host":"127.0.0.1","remote_port":7000,'
    b'"tp_size":1,"bidikv":{"v":1,"reason":"hit","prompt_tokens":700,"remote_tokens":640,"local_tokens":0,'
    b'"computed_tokens":60,"diverged_at_token":null}}}'
)
_ANSWER: Final = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"an answer"},"finish_reason":"stop"}],"usage":{"prompt_tokens":700,"completion_tokens":2,'
    b'"total_tokens":702}}'
)
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"%d"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_LAST: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
_MODELS: Final = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"vllm"}]}'


class Pace:
    """How fast every stream of this engine goes.

    Attributes:
        interval_s: Between two events; 0 writes them as fast as the loop turns.
    """

    interval_s = 0.0


class Connection(asyncio.Protocol):
    """One client's connection; one request at a time."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._url = b""
        self._left = 0
        self._next_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, _error: Exception | None) -> None:
        """The peer left: its stream ends."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._pieces = []
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """Take the target."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Answer."""
        if self._parser.get_method() != b"POST":
            self._write(_JSON % ((len(_MODELS), _MODELS) if self._url.startswith(b"/v1") else (2, b"{}")))
            return
        if self._url.startswith(b"/pace/"):
            self._pace.interval_s = float(self._url.removeprefix(b"/pace/"))
            self._write(_JSON % (2, b"{}"))
            return
        body = b"".join(self._pieces)
        edges = body if len(body) <= 2 * _EDGE_BYTES else body[:_EDGE_BYTES] + body[-_EDGE_BYTES:]
        if _PREFILL.search(edges):
            self._write(_JSON % (len(_HANDLE), _HANDLE))
        elif _STREAM.search(edges):
            counted = _MAX_TOKENS.search(edges)
            self._left = int(counted.group(1)) if counted else 1
            self._next_s = self._loop.time()
            self._write(_EVENTS)
            self._event()
        else:
            self._write(_JSON % (len(_ANSWER), _ANSWER))

    def _event(self) -> None:
        if self._transport is None:
            return
        if not self._left:
            self._write(_framed(_LAST) + b"0\r\n\r\n")
            return
        self._left -= 1
        self._write(_framed(_EVENT % time.monotonic_ns()))
        self._next_s += self._pace.interval_s
        self._loop.call_at(self._next_s, self._event)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(port: int) -> None:
    pace = Pace()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(pace), "127.0.0.1", port, backlog=1024
    )
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
