"""Stock vLLM's NixlConnector with `bidirectional_kv_xfer`: prefill pulls what decode returned a handle for.

Stock engines read by position and prove nothing, so the proof is made here. The messages must append to the turn, and
prefill renders the prompt (`/render`) before it computes it: a handle is sent only as far as those tokens are the ones
that decode computed, and prefill is given the very tokens that were compared. What cannot be proven is not sent.

vLLM returns handles in whole answers only: a streamed turn leaves none.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bidikv_server import wire
from bidikv_server.reasons import Reason
from bidikv_server.router.core.accounts import read_prefill_answer
from bidikv_server.router.core.answers import conceal, conceal_transfer
from bidikv_server.router.core.bodies import prefill_body, returns_token_ids
from bidikv_server.router.core.decoded import read_decoded
from bidikv_server.router.core.digests import with_message
from bidikv_server.router.core.handles import Handle, HandleBook, block_digests, first_blocks, proven_blocks
from bidikv_server.router.core.json_bytes import encode_from
from bidikv_server.router.core.outcomes import unaccounted
from bidikv_server.router.core.paths import CHAT_PATH
from bidikv_server.router.core.prompt_tokens import Tokenised, obstacle
from bidikv_server.router.errors import UpstreamFault
from bidikv_server.router.transfer.names import NIXL_BIDIRECTIONAL
from bidikv_server.router.transfer.system import Leg, LegOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.core.accounts import PrefillAnswer
    from bidikv_server.router.core.digests import Digest
    from bidikv_server.router.core.engines import EngineSnapshot, Role
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.transfer.system import Attempt
    from bidikv_server.router.upstream import EngineClient

_log = logging.getLogger(__name__)
_BLOCK_SIZE: Final = re.compile(rb'^vllm:cache_config_info\{[^\n]*?\bblock_size="(\d+)"', re.MULTILINE)
_TOKEN_FIELDS: Final = ("prompt_token_ids", "token_ids")


class Bidirectional:
    """Keeps the handles of all conversations, and the engines' block sizes."""

    name = NIXL_BIDIRECTIONAL
    order = LegOrder.IN_TURN

    def __init__(
        self,
        client: EngineClient,
        book: HandleBook,
        *,
        probe_timeout_s: float,
        render_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self.book = book
        self._probe_timeout_s = probe_timeout_s
        self._render_timeout_s = render_timeout_s
        self._clock = clock
        self._block_sizes: dict[EngineUrl, int] = {}
        self._mute: set[EngineUrl] = set()

    async def begin(self, attempt: Attempt) -> BidirectionalTransfer:
        """Begin an attempt: take the handle, if there is one that this request may use, and prove it."""
        found: BidirectionalTransfer | Reason = Reason.UNSUPPORTED
        if attempt.barred is not None:
            found = attempt.barred
        elif attempt.plan.prefill is not None and _is_provable(attempt):
            found = await self._pull(attempt, attempt.plan.prefill)
        if isinstance(found, Reason):
            return BidirectionalTransfer(self, attempt, dict(wire.NOTHING_TO_PULL), found)
        return found

    async def probe(self, url: EngineUrl, role: Role) -> None:  # noqa: ARG002  (both sides must be alike)
        """Learn an engine's block size, once."""
        if url in self._block_sizes:
            return
        try:
            answer = await self._client.get(url, "/metrics", timeout_s=self._probe_timeout_s)
        except UpstreamFault:
            return
        if (match := _BLOCK_SIZE.search(answer.body)) is not None:
            self._block_sizes[url] = int(match[1])

    def engine_down(self, url: EngineUrl) -> None:
        """Forget its handles: it comes back with nothing, and maybe with another block size."""
        self._block_sizes.pop(url, None)
        self._mute.discard(url)
        self.book.drop_engine(url)

    def keep(self, attempt: Attempt, raw: bytes) -> None:
        """Keep the handle of a turn that has ended well, if it can be proven later."""
        block_size = self._block_sizes.get(attempt.plan.decode.url)
        decoded = read_decoded(raw)
        prefixes = attempt.request.chain.prefixes
        if decoded is None or block_size is None or not prefixes or not _is_provable(attempt):
            return
        blocks = block_digests(decoded.token_ids, block_size, decoded.computed_tokens)
        if not blocks or len(blocks) > len(decoded.params["remote_block_ids"][0]):
            return
        message = decoded.message
        appended_to = prefixes[-1] if message is None else with_message(prefixes[-1], message)
        handle = Handle(attempt.plan.decode.url, decoded.params, block_size, blocks, whole=message is None)
        self.book.keep(attempt.match.key, appended_to, handle, self._clock())

    async def _pull(self, attempt: Attempt, prefill: EngineSnapshot) -> BidirectionalTransfer | Reason:
        handle = self.book.take(attempt.match.key, _on_the_way(attempt), self._clock())
        if isinstance(handle, Reason):
            return Reason.NEW_CONVERSATION if attempt.match.source is None else handle
        if self._block_sizes.get(prefill.url) != handle.block_size:
            return Reason.INCOMPATIBLE
        tokens = await self._render(attempt, prefill.url)
        if tokens is None:
            return Reason.UNSUPPORTED
        blocks = proven_blocks(handle, tokens)
        if not blocks:
            return Reason.DIVERGED
        params = first_blocks(handle, blocks)
        if attempt.request.path == CHAT_PATH:
            params["prompt_token_ids"] = tokens
        reason = Reason.HIT if blocks == len(handle.blocks) else Reason.HIT_DIVERGED
        return BidirectionalTransfer(self, attempt, params, reason, pulled_tokens=blocks * handle.block_size)

    async def _render(self, attempt: Attempt, url: EngineUrl) -> list[int] | None:
        """The prompt's tokens as this engine makes them; None if it does not say."""
        try:
            answer = await self._client.post(
                url,
                f"{attempt.request.path}/render",
                body=encode_from(attempt.request.body, prefill_body(attempt.request, None)),
                headers=attempt.headers,
                timeout_s=self._render_timeout_s,
            )
        except UpstreamFault:
            return None
        if answer.status == 200:
            return rendered_tokens(answer.body)
        if answer.status in {403, 404, 501} and url not in self._mute:
            self._mute.add(url)
            _log.warning(
                "prefill engine %s renders no prompts (status %d), so nothing is read back: start it with"
                " --enable-scale-out",
                url,
                answer.status,
            )
        return None


def rendered_tokens(raw: bytes) -> list[int] | None:
    """Token ids in vLLM's answer to a render request; None if it has none, or media among them."""
    try:
        answer = json.loads(raw)
    except ValueError:
        return None
    if isinstance(answer, list) and len(answer) == 1:
        (answer,) = answer
    if not isinstance(answer, dict) or answer.get("features") is not None:
        return None
    tokens = answer.get("token_ids")
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        return None
    return tokens


def _is_provable(attempt: Attempt) -> bool:
    """Whether tokens say all of the prompt, and decode can be asked for them.

    Media stand behind tokens that are alike for all, and an answer that repeats the prompt (`echo`) comes out otherwise
    where token ids are asked for.
    """
    request = attempt.request
    in_the_way = obstacle(request.path, request.body, has_media=request.media.present)
    return returns_token_ids(request.path) and in_the_way not in {Tokenised.MEDIA, Tokenised.NEEDS_TEXT}


def _on_the_way(attempt: Attempt) -> Sequence[Digest]:
    """Prefixes at which a turn may have ended that this request appends to. In a chat something must follow."""
    prefixes = attempt.request.chain.prefixes
    return prefixes[:-1] if attempt.request.path == CHAT_PATH else prefixes


@dataclass(frozen=True, slots=True)
class BidirectionalTransfer:
    """One attempt.

    Attributes:
        system: Where the turn's own handle goes.
        attempt: What it is an attempt at.
        params: `kv_transfer_params` of the prefill leg.
        reason: The outcome, unless prefill's usage says otherwise.
        pulled_tokens: Tokens that prefill is told to fetch; 0 computes all of them.
    """

    system: Bidirectional
    attempt: Attempt
    params: dict[str, Any] = field(repr=False)
    reason: Reason
    pulled_tokens: int = 0

    @property
    def prefill(self) -> Leg:
        """Compute for decode, and fetch what is proven."""
        return Leg(self.params)

    @property
    def pulls(self) -> bool:
        """Whether anything is."""
        return self.pulled_tokens > 0

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """The handle for decode."""
        return read_prefill_answer(raw)

    def decode(self, prefilled: PrefillAnswer) -> Leg:
        """The handle as it came, and a wish for token ids where decode will return a handle in its turn.

        Without a handle no parameters at all: decode would hold the blocks until their time is up, for nobody.
        """
        fields = {"return_token_ids": True} if prefilled.handle is not None and self._keeps else {}
        return Leg(prefilled.handle, fields=fields)

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """What was asked for, where prefill's usage does not speak against it."""
        cached = prefilled.cached_tokens
        declined = self.pulls and cached is not None and cached < self.pulled_tokens
        reason = Reason.NO_ACCOUNT if declined else self.reason
        return unaccounted(prefilled, decided, reason)

    def show(self, raw: bytes, *, drop: bool) -> bytes:
        """The answer as it would have come without our wishes; the handle is kept."""
        if self._keeps:
            self.system.keep(self.attempt, raw)
        shown = conceal_transfer(raw, drop=drop)
        asked = self.attempt.request.body.get("return_token_ids")
        return shown if asked or not self._keeps else conceal(shown, _TOKEN_FIELDS)

    @property
    def _keeps(self) -> bool:
        """A handle of this turn may be used later. vLLM returns none in a stream."""
        request = self.attempt.request
        wanted = request.recorded and self.attempt.keep.retain_s > 0
        return wanted and not request.body.get("stream") and _is_provable(self.attempt)
