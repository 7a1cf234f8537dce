"""Engines that are made up but for their memory: the product's own digests, index and accounts say what is reused.

A token is a character of the prompt as a template would write it, so what the model wrote has to come back in its own
spelling. Decode remembers every sequence that it retained, so that a test can say what might have been reused at most.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fake_engine import Failure, FakeEngine, Seen

from bidikv._fake_answers import event_stream
from bidikv_server.connector.core import digests, readback
from bidikv_server.connector.core.accounts import Account
from bidikv_server.connector.index_service import IndexService
from bidikv_server.connector.side_channel import Server
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from bidikv_server.connector.core.retention import Match

BLOCK = 16
_BLOCKS = 1 << 15


def prompt_of(body: Mapping[str, Any]) -> list[int]:
    """The prompt's tokens: tools first, then each message between marks of its own."""
    text = json.dumps(body["tools"]) if body.get("tools") else ""
    text += "".join(f"<{message['role']}>{_written(message)}</>" for message in body["messages"])
    return [ord(character) for character in text + "<assistant>"]


def _written(message: Mapping[str, Any]) -> str:
    calls = "".join(
        call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls") or ()
    )
    return (message.get("content") or "") + calls


@dataclass
class RetainingDecode(FakeEngine):
    """Answers as `play` says, and retains what it is asked to.

    Attributes:
        play: The model: an assistant message for a request's body.
        retained: All that it ever retained, as tokens of whole blocks.
    """

    play: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda body: {
        "role": "assistant",
        "content": "Hello",
    }
    retained: list[tuple[int, ...]] = field(default_factory=list)
    index: IndexService = field(default_factory=lambda: IndexService("engine", {}, _BLOCKS))
    _blocks: Any = field(default_factory=itertools.count)

    async def _post(self, seen: Seen, failure: Failure, send: Any) -> None:
        if failure.hang or failure.status != 200:
            await super()._post(seen, failure, send)
            return
        message, prompt = self.play(seen.body), prompt_of(seen.body)
        written = [ord(character) for character in _written(message) + "</>"]
        self._retain(seen, prompt + written)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(written),
            "total_tokens": len(prompt) + len(written),
        }
        if seen.body.get("stream"):
            whole = event_stream(message, usage, seen.body, breaks=False)
            chunks = tuple(event + b"\n\n" for event in whole.split(b"\n\n") if event)
            await self._body(send, b"text/event-stream; charset=utf-8", chunks, failure)
            return
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        raw = json.dumps({**answer, "usage": usage}).encode()
        await self._body(send, b"application/json", (raw,), failure)

    def _retain(self, seen: Seen, tokens: list[int]) -> None:
        ours = seen.ours
        if ours.get("release"):
            self.index.release(ours["conversation"])
        if ours.get("retain_s", 0) <= 0:
            return
        # The last token's KV is not there yet.
        blocks = (len(tokens) - 1) // BLOCK
        self.retained.append(tuple(tokens[: blocks * BLOCK]))
        self.index.retain(
            ours["conversation"],
            chain_of(seen, tokens, blocks),
            [next(self._blocks) % _BLOCKS for _ in range(blocks)],
            ttl_s=ours["retain_s"],
        )

    def look_up(self, conversation: str, wanted: Sequence[bytes]) -> Match:
        """What it holds of a prompt."""
        with self.index._lock:
            return self.index._index.lookup(conversation, wanted, now_s=time.monotonic())

    @property
    def held_tokens(self) -> int:
        """What it still holds."""
        with self.index._lock:
            self.index._index.check_integrity()
            return len(self.index._index) * BLOCK


@dataclass(frozen=True)
class Leg:
    """One prefill leg.

    Attributes:
        seen: The request.
        account: What was told of its reuse.
        reusable_tokens: The most that any decode engine could have given of it then, in whole blocks.
    """

    seen: Seen
    account: Account
    reusable_tokens: int


@dataclass
class RetainingPrefill(FakeEngine):
    """Asks the first index that the router names, and tells what became of the prompt.

    Attributes:
        decodes: The engines behind their indexes' addresses.
        legs: In order.
    """

    decodes: dict[str, RetainingDecode] = field(default_factory=dict)
    legs: list[Leg] = field(default_factory=list)

    def _prefill(self, seen: Seen) -> dict[str, Any]:
        prompt = prompt_of(seen.body)
        chain = chain_of(seen, prompt, readback.usable_blocks(len(prompt), BLOCK))
        reason, match, pull = Reason.NEW_CONVERSATION, None, None
        if seen.ours["sources"]:
            decode = self.decodes[seen.ours["sources"][0]]
            match = decode.look_up(seen.ours["conversation"], chain.digests)
            decided = readback.decide(match, local_tokens=0, block_size=BLOCK, threshold_tokens=BLOCK)
            pull = decided if isinstance(decided, readback.Pull) else None
            reason = decided.reason if isinstance(decided, readback.Pull) else decided
        account = Account.make(
            reason,
            match,
            pull,
            prompt_tokens=len(prompt),
            remote_tokens=len(pull.block_ids) * BLOCK if pull is not None else 0,
            local_tokens=0,
            packed=chain.tokens,
            block_size=BLOCK,
        )
        self.legs.append(Leg(seen, account, _reusable_tokens(prompt, self.decodes.values())))
        self.account = account.answer()
        return super()._prefill(seen)


@contextlib.contextmanager
def retaining(
    play: Callable[[Mapping[str, Any]], dict[str, Any]], decodes: int
) -> Iterator[RetainingPrefill]:
    """A prefill engine and so many decode engines, whose indexes answer on loopback."""
    with contextlib.ExitStack() as stack:
        prefill = RetainingPrefill("p")
        for number in range(decodes):
            decode = RetainingDecode(f"d{number}", play=play)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            stack.enter_context(contextlib.closing(Server(address, decode.index.answer)))
            decode.publish_index(decode.name, address)
            prefill.decodes[address] = decode
        yield prefill


def chain_of(seen: Seen, tokens: list[int], blocks: int) -> digests.Chain:
    """The digests of a request's first blocks."""
    start = digests.seed("engine", seen.ours["salt"], seen.body.get("cache_salt") or "")
    return digests.chain(start, tokens, block_size=BLOCK, blocks=blocks)


def _reusable_tokens(prompt: list[int], decodes: Iterable[RetainingDecode]) -> int:
    usable = readback.usable_blocks(len(prompt), BLOCK) * BLOCK
    longest = 0
    for tokens in itertools.chain.from_iterable(decode.retained for decode in decodes):
        pairs = enumerate(zip(tokens, prompt[:usable], strict=False))
        shared = next((place for place, (old, new) in pairs if old != new), min(len(tokens), usable))
        longest = max(longest, shared // BLOCK * BLOCK)
    return longest
