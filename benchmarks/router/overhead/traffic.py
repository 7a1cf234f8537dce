"""What the clients send: the turns of agents' conversations, written before the clock runs."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Final

TURNS: Final = 8
"""Turns of a conversation before its client begins another one."""
LARGE_MESSAGES: Final = 200
_WORDS: Final = (
    "the",
    "cache",
    "of",
    "a",
    "block",
    "reads",
    "router",
    "\n",
    '"quoted"',
    "naïve",
    "def f(x):",
    "0.25",
)
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file of the repository and say what it holds.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read", "search", "write")
]
_PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_DECODE: Final = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [[1, 2, 3]],
    "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 7000, "tp_size": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn's requests, headers included.

    Attributes:
        routed: What a router gets.
        legs: What a client without a router sends: to prefill, then to decode.
    """

    routed: bytes
    legs: tuple[bytes, bytes]


def conversation(client: int, number: int, *, stream: bool, max_tokens: int) -> list[Turn]:
    """The turns of one conversation of one client: 3 to 8 KB each, every turn longer by two messages."""
    source = random.Random(f"{client} {number}")  # noqa: S311  # traffic, not a secret
    history = [{"role": "system", "content": _text(source, 1500)}]
    turns = []
    for _ in range(TURNS):
        history.append({"role": "user", "content": _text(source, 300)})
        turns.append(_turn(f"c{client}-{number}", history, stream=stream, max_tokens=max_tokens))
        history.append({"role": "assistant", "content": _text(source, 300)})
    return turns


def large_conversation(number: int, *, body_bytes: int, turns: int) -> list[Turn]:
    """Turns of one conversation whose history is so long already, in messages of equal size."""
    source = random.Random(number)  # noqa: S311  # traffic, not a secret
    size = body_bytes // LARGE_MESSAGES
    history = [
        {"role": "assistant" if place % 2 else "user", "content": _text(source, size)}
        for place in range(LARGE_MESSAGES)
    ]
    written = []
    for _ in range(turns):
        history = [*history[:-1], {"role": "user", "content": _text(source, size)}]
        written.append(_turn(f"large-{number}", history, stream=True, max_tokens=1))
    return written


def _turn(session: str, messages: list[dict[str, str]], *, stream: bool, max_tokens: int) -> Turn:
    body = {"model": "m", "messages": messages, "tools": _TOOLS, "max_tokens": max_tokens, "stream": stream}
    prefill = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": _PREFILL}
    return Turn(
        _request(body, session),
        (_request(prefill, session), _request({**body, "kv_transfer_params": _DECODE}, session)),
    )


def _request(body: dict[str, Any], session: str) -> bytes:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\n"
        f"Accept: application/json\r\nUser-Agent: benchmark\r\nX-Session-ID: {session}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _text(source: random.Random, size: int) -> str:
    words: list[str] = []
    length = 0
    while length < size:
        words.append(source.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)
