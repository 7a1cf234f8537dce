"""Lookalikes of stock vLLM engines with other transfer systems: what they answer to a leg, and to a question."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fake_engine import FakeEngine, Seen, _whole

BLOCK_SIZE = 4
ROLES = {"system": 1000, "user": 1001, "assistant": 1002}


def render(body: dict[str, Any]) -> list[int]:
    """A prompt's tokens: one for each role, one for each character, and the answer's role at the end of a chat."""
    if "messages" not in body:
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) else [ord(character) for character in prompt]
    tokens = []
    for message in body["messages"]:
        tokens += [ROLES[message["role"]], *map(ord, message["content"])]
    return [*tokens, ROLES["assistant"]]


def prompt_of(seen: Seen) -> list[int]:
    """The tokens that a leg is computed from: those that it was given, else its own."""
    return (seen.params or {}).get("prompt_token_ids") or render(seen.body)


@dataclass
class StockEngine(FakeEngine):
    """No account of reuse, and whole answers with what a request asked for.

    Attributes:
        text: What it answers.
        bidirectional: A decode leg's answer returns a handle.
        renders: It was started with --enable-scale-out.
        cached_tokens: What its usage tells of prefix caches.
        finish_reason: How its prefill legs end.
        ranks: What its bootstrap server answers.
        with_handle_status: Status of a prefill leg that has something to pull.
        groups: Groups of blocks in its handles.
    """

    account: dict[str, Any] | None = None
    text: str = "Hello there"
    bidirectional: bool = True
    renders: bool = True
    cached_tokens: int | None = None
    finish_reason: str = "length"
    ranks: dict[str, Any] = field(
        default_factory=lambda: {"0": {"engine_id": "mooncake-0", "worker_addr": {}}}
    )
    with_handle_status: int = 200
    groups: int = 1
    rendered: int = 0

    async def _get(self, path: str, query: str, send) -> None:
        if path == "/query":
            await _whole(send, 200, json.dumps(self.ranks).encode())
        elif path == "/metrics":
            info = f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",engine="0"}} 1.0\n'
            await _whole(send, 200, info.encode(), b"text/plain")
        else:
            await super()._get(path, query, send)

    async def _post(self, seen: Seen, failure, send) -> None:
        if seen.path.endswith("/render"):
            self.seen.remove(seen)
            self.rendered += 1
            await self._render(seen, send)
        elif self.with_handle_status != 200 and (seen.params or {}).get("remote_block_ids"):
            await _whole(send, self.with_handle_status, b'{"error":{"message":"load failed"}}')
        else:
            if not (seen.params or {}).get("do_remote_decode"):
                self.answer = self._answer(seen)
            await super()._post(seen, failure, send)

    async def _render(self, seen: Seen, send) -> None:
        assert "kv_transfer_params" not in seen.body
        if not self.renders:
            await _whole(send, 403, b'{"error":{"message":"disabled"}}')
            return
        answer = {"token_ids": render(seen.body), "features": None}
        one = answer if "messages" in seen.body else [answer]
        await _whole(send, 200, json.dumps(one).encode())

    def _prefill(self, seen: Seen) -> dict[str, Any]:
        self.token_ids = prompt_of(seen)
        answer = super()._prefill(seen)
        answer["choices"] = [{**dict(*answer["choices"]), "index": 0, "finish_reason": self.finish_reason}]
        answer["usage"] = self._usage(seen)
        return answer

    def _usage(self, seen: Seen) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(prompt_of(seen))}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def _answer(self, seen: Seen) -> bytes:
        """As vLLM writes it: every optional field there, null unless asked for."""
        asked = seen.body.get("return_token_ids")
        prompt, generated = prompt_of(seen), [*map(ord, self.text), 0]
        ids = generated if asked else None
        answer: dict[str, Any] = {"id": "c1"}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids}
        if "messages" in seen.body:
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None, "tool_calls": []}
        else:
            choice |= {"text": self.text, "prompt_token_ids": prompt if asked else None}
        answer |= {"choices": [choice], "usage": self._usage(seen)}
        if "messages" in seen.body:
            answer["prompt_token_ids"] = prompt if asked else None
        answer["kv_transfer_params"] = self._handle(seen, len(prompt) + len(generated) - 1)
        return json.dumps(answer, separators=(",", ":")).encode()

    def _handle(self, seen: Seen, computed: int) -> dict[str, Any] | None:
        if not self.bidirectional or not seen.params:
            return None
        # One block more than is full, and one that decode allocated for a token it never computed.
        blocks = list(range(100, 100 + computed // BLOCK_SIZE + 2))
        return {
            "do_remote_prefill": False, "do_remote_decode": True, "remote_block_ids": [blocks] * self.groups,
            "remote_engine_id": self.name, "remote_request_id": f"{self.name}-{next(self._ids)}", "remote_host": "10.0.0.9",
            "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": computed,
            "remote_blocks_expiry_time": 480.5, "transfer_mode": "pull",
        }  # fmt: skip
