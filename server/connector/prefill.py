"""Prefill's scheduler side: look up what decode holds of a prompt, plan the pull, account for it.

One request's life: LOOKING (lookup sent) -> PLANNED (what to pull is known, nothing allocated) -> READING (blocks
allocated, read handed to the workers) -> ended. A request asks at most once to pull: after a failed read it is
asked again by vLLM and answers "nothing", so a recompute can never wait for a second read that nobody queued.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bidikv_server import wire
from bidikv_server.connector import messages, requests
from bidikv_server.connector.core import digests, readback
from bidikv_server.connector.core.retention import Match
from bidikv_server.connector.metadata import ReadbackCheck
from bidikv_server.connector.nixl_agent import READBACK_PREFIX
from bidikv_server.connector.side_channel import Client
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.v1.request import Request

    from bidikv_server.connector.config import ConnectorConfig
    from bidikv_server.connector.requests import Recorder

logger = logging.getLogger("vllm.bidikv")


@dataclass(slots=True)
class _Lookup:
    """One prefill request's reuse, from lookup to account. `reason` is final unless a read is under way."""

    source: str = ""
    blocks: int = 0
    future: Future[bytes] | None = None
    found: messages.Found | None = None
    match: Match | None = None
    pull: readback.Pull | None = None
    reading: bool = False
    reading_since_s: float = 0.0
    reason: Reason = Reason.UNKNOWN
    local_tokens: int = 0
    remote_tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Read:
    """A pull that starts in this step, in the words of vLLM's NIXL metadata."""

    request_id: str
    first_block: int
    local_block_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any]
    check: ReadbackCheck


def _match(found: messages.Found, asked_blocks: int) -> Match | None:
    """The match that an index answered; None when it cannot be an answer to `asked_blocks` digests."""
    if not len(found.block_ids) == len(found.generations) <= asked_blocks:
        return None
    if found.reason not in set(Reason) or any(block_id < 0 for block_id in found.block_ids):
        return None
    return Match(tuple(found.block_ids), tuple(found.generations), Reason(found.reason))


class PrefillReadback:
    """All lookups and reads of one prefill engine. Engine core thread only."""

    def __init__(
        self, config: ConnectorConfig, identity: str, block_size: int, stats: Recorder, *, supported: bool
    ) -> None:
        """`supported` False refuses every readback: this model's blocks cannot be proven equal."""
        self._stats = stats
        self._config = config
        self._identity = identity
        self._block_size = block_size
        self._supported = supported
        self._client = Client(secret=config.secret.get_secret_value())
        self._lookups: dict[str, _Lookup] = {}
        self._reads: list[Read] = []

    def start(self, request: Request) -> None:
        """Send the lookup, if the router named a source."""
        lookup = self._lookups[request.request_id] = _Lookup()
        leg = requests.LegParams.of(request)
        if leg is None or not leg.sources:
            # The router knows why it named none, and reports that reason itself.
            lookup.reason = Reason.NEW_CONVERSATION
            return
        prompt = request.prompt_token_ids
        if not self._supported or not requests.provable(request) or prompt is None:
            lookup.reason = Reason.UNSUPPORTED
            return
        blocks = readback.usable_blocks(len(prompt), self._block_size)
        if blocks * self._block_size < self._config.kv_recompute_threshold or not blocks:
            lookup.reason = Reason.BELOW_THRESHOLD
            return
        chain = digests.chain(
            requests.seed(request, leg, self._identity), prompt, block_size=self._block_size, blocks=blocks
        )
        message = messages.Lookup(messages.VERSION, self._identity, leg.conversation, b"".join(chain))
        lookup.source, lookup.blocks = leg.sources[0], blocks
        lookup.future = self._client.submit(
            lookup.source, messages.encode(message), timeout_s=self._config.lookup_timeout_s
        )

    def matched_tokens(self, request_id: str, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens to pull beyond the local hit, for vLLM's `get_num_new_matched_tokens`."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return 0, False
        if lookup.future is not None:
            if not lookup.future.done():
                return None, False
            self._receive(lookup, lookup.future)
            lookup.future = None
            self._stats.record("lookup_seconds", time.monotonic() - lookup.started_s)
        lookup.local_tokens = local_tokens
        if lookup.match is None or lookup.reading:
            # Nothing to pull, or a read that failed: the request is being recomputed.
            return 0, False
        decision = readback.decide(
            lookup.match,
            local_tokens=local_tokens,
            block_size=self._block_size,
            threshold_tokens=self._config.kv_recompute_threshold,
        )
        if isinstance(decision, Reason):
            lookup.reason, lookup.pull = decision, None
            return 0, False
        lookup.pull = decision
        return len(decision.block_ids) * self._block_size, True

    def _receive(self, lookup: _Lookup, future: Future[bytes]) -> None:
        error = future.exception()
        if error is not None:
            lookup.reason = Reason.LOOKUP_TIMEOUT if isinstance(error, TimeoutError) else Reason.LOOKUP_FAILED
            logger.warning("bidikv: no readback, %s: %s", lookup.reason, error)
            return
        reply = messages.decode(future.result())
        if isinstance(reply, messages.Refused):
            lookup.reason = Reason.INCOMPATIBLE
            logger.warning("bidikv: %s refuses readback: %s", lookup.source, reply.message)
        elif isinstance(reply, messages.Found) and (match := _match(reply, lookup.blocks)) is not None:
            lookup.found, lookup.match, lookup.reason = reply, match, match.reason
        else:
            lookup.reason = Reason.LOOKUP_FAILED
            logger.warning("bidikv: no readback: %s sent an answer that cannot be read", lookup.source)

    def commit(self, request_id: str, block_ids: list[int], external_tokens: int) -> None:
        """VLLM allocated `block_ids` for the whole prompt so far; read into those that the plan covers."""
        lookup = self._lookups[request_id]
        pull, found = lookup.pull, lookup.found
        if pull is None or found is None or external_tokens != len(pull.block_ids) * self._block_size:
            raise RuntimeError(
                f"request {request_id} was given {external_tokens} tokens that were not planned"
            )
        lookup.reading = True
        lookup.reading_since_s = time.monotonic()
        lookup.remote_tokens = external_tokens
        local = tuple(block_ids[pull.first : pull.first + len(pull.block_ids)])
        self._reads.append(
            Read(
                request_id=request_id,
                first_block=pull.first,
                local_block_ids=local,
                kv_transfer_params={
                    "remote_block_ids": (list(pull.block_ids),),
                    "remote_engine_id": found.engine_id,
                    "remote_request_id": f"{READBACK_PREFIX}{uuid.uuid4().hex}",
                    "remote_host": found.host,
                    "remote_port": found.port,
                    "remote_num_tokens": (pull.first + len(pull.block_ids)) * self._block_size,
                    "tp_size": found.tp_size,
                    "dcp_size": found.dcp_size,
                    "pp_size": found.pp_size,
                },
                check=ReadbackCheck(
                    index_address=lookup.source,
                    epoch=found.epoch,
                    block_ids=pull.block_ids,
                    generations=pull.generations,
                    timeout_s=self._config.read_timeout_s,
                ),
            )
        )

    def take_reads(self) -> list[Read]:
        """Reads committed since the last call."""
        reads, self._reads = self._reads, []
        return reads

    def ended(self, outcomes: dict[str, Reason]) -> None:
        """The workers' account of reads: HIT, or why the pulled blocks were dropped."""
        for request_id, outcome in outcomes.items():
            lookup = self._lookups.get(request_id)
            if lookup is None or lookup.pull is None:
                continue
            self._stats.record("readback_seconds", time.monotonic() - lookup.reading_since_s)
            result = "verified" if outcome is Reason.HIT else "rejected"
            self._stats.record("readback_blocks", len(lookup.pull.block_ids), result)
            if outcome is Reason.HIT:
                lookup.reason = lookup.pull.reason
            else:
                lookup.reason, lookup.remote_tokens = outcome, 0
                logger.warning("bidikv: readback of %s dropped, recomputing: %s", request_id, outcome)

    def account(self, request: Request) -> dict[str, Any]:
        """The `bidikv` part of prefill's answer; forgets the request."""
        lookup = self._lookups.pop(request.request_id, None) or _Lookup()
        prompt_tokens = request.num_prompt_tokens
        remote_tokens = lookup.remote_tokens if lookup.reading else 0
        computed_tokens = prompt_tokens - lookup.local_tokens - remote_tokens
        diverged = readback.diverged_at_token(lookup.match, block_size=self._block_size)
        self._stats.record("readbacks", 1, str(lookup.reason))
        for source, tokens in (
            ("remote", remote_tokens),
            ("local", lookup.local_tokens),
            ("computed", computed_tokens),
        ):
            self._stats.record("prompt_tokens", tokens, source)
        logger.info(
            "bidikv: request %s reason=%s prompt=%d remote=%d local=%d computed=%d diverged_at=%s",
            request.request_id,
            lookup.reason,
            prompt_tokens,
            remote_tokens,
            lookup.local_tokens,
            computed_tokens,
            diverged,
        )
        return {
            wire.KEY: {
                "v": wire.VERSION,
                "reason": str(lookup.reason),
                "prompt_tokens": prompt_tokens,
                "remote_tokens": remote_tokens,
                "local_tokens": lookup.local_tokens,
                "computed_tokens": computed_tokens,
                "diverged_at_token": diverged,
            }
        }

    def close(self) -> None:
        """Stop the lookup client. Idempotent."""
        self._client.close()
