"""Requests that nobody should send: each is a list of pieces to write to a fresh connection, drawn from a seeded source."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/messages/count_tokens")
GOOD = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
MAX_BODY_BYTES = 100_000
"""The router's limit in these tests."""


@dataclass(frozen=True)
class Attack:
    """One hostile exchange.

    Attributes:
        kind: What is wrong with it.
        pieces: Written one after the other.
        may_pass: It is no more than odd: an engine may answer it.
        leaves: The client hangs up at once and reads nothing.
    """

    kind: str
    pieces: tuple[bytes, ...]
    may_pass: bool = False
    leaves: bool = False


def attacks(seed: int, count: int) -> Iterator[Attack]:
    """So many of all kinds, in a random order that the seed decides."""
    source = random.Random(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        yield kind(source)


def request(body: bytes, path: str = CHAT, headers: tuple[bytes, ...] = (), method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"Host: h", b"Connection: close", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]) + body


def head(*headers: bytes, line: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"Host: h", b"Connection: close", *headers, b"", b""])


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def truncated(source: random.Random) -> Attack:
    body = encoded(GOOD)
    return Attack("truncated JSON", (request(body[: source.randrange(len(body))], source.choice(PATHS[:4])),))


def deep(source: random.Random) -> Attack:
    opening, closing = source.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = source.choice([2_000, 5_000, 30_000])
    nested = opening * depth + b"1" + closing * source.choice([0, depth])
    field = source.choice([b"messages", b"tools", b"session_id", b"vllm_xargs", b"kv_transfer_params", b"x"])
    body = b'{"model":"m","messages":[],"' + field + b'":' + nested + b"}"
    return Attack("deep JSON", (request(body),))


def odd_value(source: random.Random) -> object:
    return source.choice(
        [
            None, True, 0, -1, 10**30, 1.5, "", "x" * 300, "\0", "\ud7ff", [], {}, [[]], [None], [1, "a"], {"a": None},
            {"role": 1}, [{"role": "user"}], [{"role": None, "content": {}}], [{"role": "user", "content": [1, None, {}]}],
            [{"role": "assistant", "tool_calls": [None, {}, {"function": 1}, {"function": {"arguments": "[" * 2000}}]}],
            [{"role": "system", "content": [{"type": "text", "text": 1}, {"text": []}]}],
            {"id": 1}, {"session_id": ["a"]}, {"effort": {}}, [{"type": {}}], [{"type": "message", "content": 1}],
        ]
    )  # fmt: skip


FIELDS = (
    "model", "messages", "prompt", "input", "instructions", "tools", "tool_choice", "stream", "stream_options", "n",
    "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "cache_salt", "session_id", "metadata",
    "conversation", "previous_response_id", "store", "background", "vllm_xargs", "kv_transfer_params", "system",
    "prompt_logprobs", "logprobs", "echo", "suffix", "truncate_prompt_tokens", "reasoning", "previous_input_messages",
    "litellm_session_id", "conversation_id", "chat_template_kwargs", "documents", "prompt_embeds", "truncation",
)  # fmt: skip


def wrong_types(source: random.Random) -> Attack:
    body = {"model": "m", "messages": [], "prompt": "p", "input": "i", "max_tokens": 3}
    for _ in range(source.randint(1, 4)):
        body[source.choice(FIELDS)] = odd_value(source)
    return Attack("wrong types", (request(encoded(body), source.choice(PATHS)),), may_pass=True)


def no_object(source: random.Random) -> Attack:
    raw = source.choice([b"", b"null", b"1", b'"x"', b"[]", b"[{}]", b"{}", b" ", b"\n" * 1000])
    return Attack("no object", (request(raw, source.choice(PATHS[:4])),))


def bad_text(source: random.Random) -> Attack:
    raw = encoded(GOOD)
    text = source.choice(
        [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80", b"\xe2\x82"]
    )
    body = source.choice(
        [
            raw.replace(b"hello", text),
            raw.replace(b"max_tokens", text),
            b"\xef\xbb\xbf" + raw,
            raw.decode().encode("utf-16"),
            raw.decode().encode("utf-32-be"),
            raw.replace(b"hello", b"\\ud800"),
            raw.replace(b"hello", b"\\udc00\\ud800"),
            raw.replace(b"max_tokens", b"\\ud83d"),
            raw.replace(b"hello", b"a\nb\x00"),
        ]
    )
    return Attack("bad text", (request(body),))


def bad_numbers(source: random.Random) -> Attack:
    number = source.choice(
        [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"0x1", b"1.", b".5", b"+1", b"--1"]
    )
    return Attack("bad numbers", (request(encoded(GOOD).replace(b": 3", b":" + number)),))


def huge_numbers(source: random.Random) -> Attack:
    number = source.choice(
        [b"9" * 40, b"-" + b"9" * 5_000, b"9" * 20_000, b"1e308", b"1" + b"0" * 400, b"-0"]
    )
    body = encoded(GOOD).replace(b": 3", b":" + number)
    return Attack("huge numbers", (request(body),), may_pass=True)


def huge_body(source: random.Random) -> Attack:
    size = MAX_BODY_BYTES + 1
    pieces = source.choice(
        [
            (head(b"Content-Length: %d" % (size * source.choice([1, 1000, 10**9]))), b"{" * 1000),
            (head(b"Transfer-Encoding: chunked"), *[b"10000\r\n" + b" " * 65536 + b"\r\n"] * 2),
        ]
    )
    return Attack("huge body", pieces)


def absurd_length(source: random.Random) -> Attack:
    length = source.choice([b"-1", b"+5", b"0x10", b"1e3", b"9" * 30, b"5,5", b"5 5", b"\xb2", b"5;", b'"5"'])
    return Attack("absurd length", (head(b"Content-Length: " + length), b"{}   "))


def smuggling(source: random.Random) -> Attack:
    chunked = b"0\r\n\r\nGET /bidikv/v1/config HTTP/1.1\r\nHost: h\r\n\r\n"
    headers = source.choice(
        [
            (b"Content-Length: 4", b"Transfer-Encoding: chunked"),
            (b"Transfer-Encoding: chunked", b"Content-Length: 4"),
            (b"Content-Length: 4", b"Content-Length: 5"),
            (b"Transfer-Encoding: xchunked",),
            (b"Transfer-Encoding : chunked",),
            (b"Transfer-Encoding: chunked", b"Transfer-Encoding: x"),
            (b"Transfer-Encoding: chunked, identity",),
            (b"X: y\r\n Transfer-Encoding: chunked",),
            (b"X: y\rTransfer-Encoding: chunked",),
            (b"X: y\nTransfer-Encoding: chunked",),
            (b"Content-Length: 4\x00",),
            (b"Content Length: 4",),
            (b": 4",),
        ]
    )
    return Attack("smuggling", (head(*headers), chunked))


def bad_chunks(source: random.Random) -> Attack:
    chunks = source.choice(
        [
            b"FFFFFFFFFFFFFFFF\r\n", b"FFFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"zz\r\n", b"5\r\nab\r\n", b"2\r\n{}\r\n" * 3,
            b"2;" + b"x" * 70_000 + b"\r\n{}\r\n", b"2\n{}\n0\n\n", b"1\r\n{\r\n1\r\n", b"0\r\nContent-Length: 4\r\n\r\n",
            b"0\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(400)) + b"\r\n",
        ]
    )  # fmt: skip
    return Attack("bad chunks", (head(b"Transfer-Encoding: chunked"), chunks), leaves=b"0\r\n" not in chunks)


def header_flood(source: random.Random) -> Attack:
    headers = source.choice(
        [
            tuple(b"X-%d: y" % number for number in range(300)),
            (b"X: " + b"y" * 70_000,),
            (b"x" * 70_000 + b": y",),
            tuple(b"Cookie: " + b"y" * 5_000 for _ in range(15)),
            tuple(b"Authorization: Bearer x" for _ in range(300)),
        ]
    )
    return Attack("header flood", (request(encoded(GOOD), headers=headers),))


def endless_head(source: random.Random) -> Attack:
    filler = source.choice([b"X-A: y\r\n", b"y", b"\r\n", b"a" * 50])
    start = b"" if filler == b"\r\n" else b"GET /live HTTP/1.1\r\nX: "
    return Attack("endless head", (start, *[filler * (40_000 // len(filler))] * 2))


def odd_headers(source: random.Random) -> Attack:
    name = source.choice(
        [b"X-Session-ID", b"x-bidikv-turn", b"x-bidikv-readback", b"baggage", b"x-codex-turn-metadata", b"traceparent",
         b"Authorization", b"x-api-key", b"X-Request-Id", b"thread-id", b"Content-Type", b"x-dynamo-session-final"]
    )  # fmt: skip
    value = source.choice(
        [b"", b"\xff\xfe", b"a" * 20_000, b"[" * 20_000, b"{" * 20_000, b"%" * 500, b"=,;" * 500, b"v=1, index=" + b"9" * 5_000,
         b"Bearer", b"Bearer " + b"\xe9" * 50, b'"' * 300, b"null", b"a,b;c=d", b"index=-1, retain=1e999, kind=?"]
    )  # fmt: skip
    return Attack("odd headers", (request(encoded(GOOD), headers=(name + b": " + value,)),), may_pass=True)


def twice(source: random.Random) -> Attack:
    doubled = source.choice(
        [(b"Host: a", b"Host: b"), (b"X-Session-ID: a", b"X-Session-ID: b"), (b"Content-Type: a",) * 9]
    )
    return Attack("doubled headers", (request(encoded(GOOD), headers=doubled),), may_pass=True)


def odd_target(source: random.Random) -> Attack:
    path = source.choice(
        ["/", "//", "/../../etc/passwd", "/%00", "/v1/%ff", "/v1/responses/a%0d%0aX:%20y", "/v1/responses/" + "a" * 200,
         "/" + "a" * 60_000, "/" + "a" * 70_000, "http://evil/v1/models", "*", "/v1/chat/completions/", "/V1/Models", "/%",
         "/v1/models?" + "a=b&" * 10_000, "/v1/responses/x?stream=maybe", "/v1/responses/x?starting_after=" + "9" * 5000,
         "/bidikv/v1/conversations?limit=-1", "/bidikv/v1/conversations/%2e%2e", "/bidikv/v1/engines/drain", "/metrics/x",
         "/v1/\xe9", "evil:443", "", "?", "#", "/v1/models#x"]
    )  # fmt: skip
    method = source.choice(
        ["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "TRACE", "PATCH", "CONNECT", "get", "G" * 300]
    )
    return Attack("odd target", (request(b"{}", path, method=method),), may_pass=True)


def no_http(source: random.Random) -> Attack:
    raw = source.choice(
        [
            source.randbytes(source.randrange(1, 3000)) + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + source.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /live HTTP/1.1\r\nHost h\r\n\r\n",
            b"GET /live HTTP/9.9\r\n\r\n",
            b"GET /live HTTP/1.1 HTTP/1.1\r\n\r\n",
            b"\0" * 5000,
            b"SSH-2.0-x\r\n",
            b"HTTP/1.1 200 OK\r\n\r\n",
        ]
    )
    return Attack("no HTTP", (raw,))


def pipelined(source: random.Random) -> Attack:
    good = request(encoded(GOOD)).replace(b"Connection: close\r\n", b"")
    tail = source.choice(
        [b"garbage\r\n\r\n", request(b"{"), b"GET /live HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"]
    )
    return Attack("pipelining", (good * source.randint(2, 8) + tail,), may_pass=True)


def upgrade(source: random.Random) -> Attack:
    to = source.choice([b"websocket", b"h2c", b"TLS/1.0"])
    headers = (
        b"Connection: Upgrade",
        b"Upgrade: " + to,
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        b"Sec-WebSocket-Version: 13",
    )
    raw = b"\r\n".join([b"GET /live HTTP/1.1", b"Host: h", *headers, b"", b""])
    return Attack("upgrade", (raw, b"\x81\x05hello"), leaves=True)


def expecting(source: random.Random) -> Attack:
    expect = source.choice([b"100-continue", b"200-ok", b"100-continue, x"])
    return Attack("expect", (head(b"Expect: " + expect, b"Content-Length: 2"), b"{}"), may_pass=True)


def early_leave(source: random.Random) -> Attack:
    raw = request(encoded({**GOOD, "stream": source.random() < 0.5}))
    return Attack("early leave", (raw[: source.randrange(1, len(raw) + 1)],), leaves=True)


def admin(source: random.Random) -> Attack:
    body = source.choice(
        [b"{}", b"[", b'{"url": 1}', b'{"url": "http://10.0.0.1:1"}', b"[" * 20_000, b"\xff"]
    )
    path = source.choice(
        ["engines/drain", "engines/undrain", "config", "conversations", "conversations/" + "0" * 32, "x"]
    )
    headers = (source.choice([b"X: y", b"Authorization: Bearer wrong", b"Authorization: Bearer admin"]),)
    method = source.choice(["GET", "POST", "DELETE"])
    return Attack("admin", (request(body, f"/bidikv/v1/{path}", headers, method),), may_pass=True)


KINDS: tuple[Callable[[random.Random], Attack], ...] = (
    truncated, deep, wrong_types, no_object, bad_text, bad_numbers, huge_numbers, huge_body, absurd_length, smuggling,
    bad_chunks, header_flood, endless_head, odd_headers, twice, odd_target, no_http, pipelined, upgrade, expecting,
    early_leave, admin, wrong_types, odd_headers,
)  # fmt: skip
