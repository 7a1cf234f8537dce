"""Prefill's scheduler side: look up what decode holds of a prompt, plan the pull, account for it.

One request's life: lookup sent -> what to pull is known, nothing allocated -> blocks allocated, read handed to the
workers -> ended. A request pulls at most once: after a read, good or bad, vLLM may ask again (a failure, a preemption) and
is answered "nothing", so a recompute can never wait for a second read that nobody queued.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from bidikv_server import wire
from bidikv_server.connector import messages, requests
from bidikv_server.connector.core import digests, readback
from bidikv_server.connector.core.accounts import Account
from bidikv_server.connector.core.costs import CostModel
from bidikv_server.connector.core.digests import ChainMemory
from bidikv_server.connector.lookup import Lookup, Offer
from bidikv_server.connector.metadata import ReadbackCheck, ReadbackOutcomes
from bidikv_server.connector.nixl_agent import READBACK_PREFIX
from bidikv_server.connector.prefill_turn import PrefillTurn, Read
from bidikv_server.connector.quarantine import Quarantine
from bidikv_server.connector.side_channel import Client
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from bidikv_server.connector.config import ConnectorConfig
    from bidikv_server.connector.requests import Recorder

logger = logging.getLogger("vllm.bidikv")

_REMEMBERED_TOKENS: Final = 1 << 23
"""Tokens of recent prompts whose digests are kept, about 70 MB with 16-token blocks; a next turn hashes only what is new."""
_PATIENCE_S: Final = 0.0005
"""How long a step's planning waits for answers, in seconds. An engine with nothing else to run asks again and again, and the
interpreter lets the thread that the answer arrives on have a turn only every 5 ms. A step takes many times longer."""


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
        self._turns: dict[str, PrefillTurn] = {}
        self._reads: list[Read] = []
        # Where reads under way go; a request may be aborted, and forgotten, before its read is over.
        self._reading_into: dict[str, tuple[int, ...]] = {}
        self._quarantine = Quarantine()
        self._patience_s = _PATIENCE_S
        self._chains = ChainMemory(_REMEMBERED_TOKENS)
        self._costs = CostModel() if config.learn_threshold else None

    def bind(self, block_pool: BlockPool) -> None:
        """Take vLLM's block pool."""
        self._quarantine.bind(block_pool)

    def start(self, request: Request) -> None:
        """Send the lookup, if the router named a source."""
        turn = self._turns[request.request_id] = PrefillTurn()
        leg = requests.LegParams.of(request)
        if leg is None or not leg.sources:
            # The router knows why it named none, and reports that reason itself.
            turn.reason = Reason.NEW_CONVERSATION
            return
        prompt = request.prompt_token_ids
        if not self._supported or not requests.provable(request) or prompt is None:
            turn.reason = Reason.UNSUPPORTED
            return
        blocks = readback.usable_blocks(len(prompt), self._block_size)
        if blocks * self._block_size < self._config.kv_recompute_threshold or not blocks:
            turn.reason = Reason.BELOW_THRESHOLD
            return
        chain = digests.chain(
            requests.seed(request, leg, self._identity),
            prompt,
            block_size=self._block_size,
            blocks=blocks,
            media=digests.media_marks(requests.media_items(request), self._block_size),
            known=self._chains.get(leg.conversation),
        )
        self._chains.put(leg.conversation, chain)
        turn.packed = chain.tokens
        turn.lookup = Lookup(
            self._client,
            leg.sources,
            messages.Lookup(messages.VERSION, self._identity, leg.conversation, b"".join(chain.digests)),
            blocks=blocks,
            now_s=time.monotonic(),
            timeout_s=self._config.lookup_timeout_s,
        )

    def matched_tokens(self, request_id: str, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens to pull beyond the local hit, for vLLM's `get_num_new_matched_tokens`."""
        turn = self._turns.get(request_id)
        if turn is None:
            return 0, False
        if turn.lookup is not None:
            now_s = time.monotonic()
            if not turn.lookup.ended(now_s):
                now_s = self._wait(turn.lookup, now_s)
            if not turn.lookup.ended(now_s):
                return None, False
            self._take_result(turn, turn.lookup)
            self._stats.record("lookup_seconds", now_s - turn.since_s)
        if turn.reading:
            # The read failed, or the request was preempted after it: a local hit now may hold what was pulled.
            return 0, False
        turn.local_tokens = local_tokens
        if turn.offer is None:
            return 0, False
        decision = readback.decide(
            turn.offer.match,
            local_tokens=local_tokens,
            block_size=self._block_size,
            threshold_tokens=self._threshold(turn.offer),
        )
        if isinstance(decision, Reason):
            turn.reason, turn.pull = decision, None
            return 0, False
        # vLLM may still refuse the offer, for instance to a request that must compute its whole prompt.
        turn.reason, turn.pull = Reason.UNSUPPORTED, decision
        return len(decision.block_ids) * self._block_size, True

    def _wait(self, lookup: Lookup, now_s: float) -> float:
        """Spend what this step has left for waiting on one lookup; returns the time then."""
        if self._patience_s <= 0:
            return now_s
        lookup.wait(self._patience_s)
        ended_s = time.monotonic()
        self._patience_s -= ended_s - now_s
        return ended_s

    def _threshold(self, offer: Offer) -> float:
        """Smallest number of tokens worth a pull."""
        epoch, now_s = offer.found.epoch, time.monotonic()
        learnt = self._costs.smallest_gain(epoch, now_s=now_s) if self._costs is not None else None
        if learnt is None:
            return self._config.kv_recompute_threshold
        self._stats.record("pull_threshold_tokens", learnt, offer.source)
        return learnt

    @staticmethod
    def _take_result(turn: PrefillTurn, lookup: Lookup) -> None:
        turn.lookup = None
        result = lookup.result()
        if isinstance(result, Offer):
            turn.offer = result
        else:
            turn.reason = result

    def commit(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """VLLM allocated `block_ids` for the whole prompt so far; read into those that the plan covers.

        Raises:
            RuntimeError: vLLM took more than was offered, or part of a block.
        """
        turn = self._turns[request_id]
        pull, offer = turn.pull, turn.offer
        count, rest = divmod(external_tokens, self._block_size)
        if pull is None or offer is None or rest or count > len(pull.block_ids):
            raise RuntimeError(
                f"request {request_id} was given {external_tokens} tokens that were not planned"
            )
        turn.reading, turn.since_s = True, time.monotonic()
        turn.remote_tokens = external_tokens
        local_block_ids = tuple(block_ids[pull.first : pull.first + count])
        self._reading_into[request_id] = local_block_ids
        found = offer.found
        self._reads.append(
            Read(
                request_id=request_id,
                first_block=pull.first,
                local_block_ids=local_block_ids,
                kv_transfer_params={
                    "remote_block_ids": (list(pull.block_ids[:count]),),
                    "remote_engine_id": found.engine_id,
                    "remote_request_id": f"{READBACK_PREFIX}{uuid.uuid4().hex}",
                    "remote_host": found.host,
                    "remote_port": found.port,
                    "remote_num_tokens": (pull.first + count) * self._block_size,
                    "tp_size": found.tp_size,
                    "dcp_size": found.dcp_size,
                    "pp_size": found.pp_size,
                    "remote_registration_generation": found.registration,
                },
                check=ReadbackCheck(
                    index_address=offer.source,
                    epoch=found.epoch,
                    block_ids=pull.block_ids[:count],
                    generations=pull.generations[:count],
                    timeout_s=self._config.read_timeout_s,
                ),
            )
        )

    def runs(self, request_id: str) -> None:
        """VLLM scheduled a request, to be computed as soon as what it waits for is there."""
        turn = self._turns.get(request_id)
        if turn is not None:
            turn.runs_since_s = time.monotonic()

    def take_reads(self) -> list[Read]:
        """Reads committed since the last call; called once a step."""
        self._patience_s = _PATIENCE_S
        reads, self._reads = self._reads, []
        return reads

    def ended(self, report: ReadbackOutcomes) -> None:
        """The workers' account of reads. Called before vLLM acts on them: stuck reads keep their blocks."""
        for request_id, ranks in report.stuck.items():
            self._quarantine.hold(request_id, self._reading_into.get(request_id, ()), ranks)
        for request_id, ranks in report.unstuck.items():
            self._quarantine.release(request_id, ranks)
        for request_id, outcome in report.outcomes.items():
            turn = self._turns.get(request_id)
            # One rank's failure is final, whatever a slower rank reports later.
            if turn is not None and turn.verdict in {None, Reason.HIT}:
                turn.verdict = outcome

    def over(self, request_ids: Iterable[str]) -> None:
        """VLLM heard from every rank: the reads have their verdict, and whatever is still written to is in quarantine."""
        for request_id in request_ids:
            turn = self._turns.get(request_id)
            if self._reading_into.pop(request_id, None) and turn is not None and turn.pull is not None:
                self._end_read(request_id, turn, turn.pull, turn.verdict or Reason.TRANSFER_FAILED)

    def _end_read(self, request_id: str, turn: PrefillTurn, pull: readback.Pull, outcome: Reason) -> None:
        good = outcome is Reason.HIT
        blocks = turn.remote_tokens // self._block_size
        now_s = time.monotonic()
        self._stats.record("readback_seconds", now_s - turn.since_s)
        if self._costs is not None and turn.offer is not None:
            self._costs.pulled(turn.offer.found.epoch, turn.remote_tokens, now_s - turn.since_s, now_s=now_s)
        self._stats.record("readback_blocks", blocks, "verified" if good else "rejected")
        turn.reason = pull.reason if good else outcome
        if not good:
            turn.remote_tokens = 0
            logger.warning("bidikv: readback of %s dropped, recomputing: %s", request_id, outcome)

    def account(self, request: Request) -> dict[str, Any]:
        """The `bidikv` part of prefill's answer; forgets the request."""
        turn = self._turns.pop(request.request_id, None) or PrefillTurn()
        account = Account.make(
            turn.reason,
            turn.offer.match if turn.offer else None,
            turn.pull if turn.reading else None,
            prompt_tokens=request.num_prompt_tokens,
            remote_tokens=turn.remote_tokens,
            local_tokens=turn.local_tokens,
            packed=turn.packed,
            block_size=self._block_size,
        )
        if not requests.ended_well(request):
            # Its client is gone: nothing was reused, and nothing lost.
            self._tell(logging.DEBUG, request, account)
            return {wire.KEY: account.answer()}
        self._tell(logging.DEBUG if account.lost_at is None else logging.INFO, request, account)
        self._count(account)
        if self._costs is not None and turn.runs_since_s and not request.num_preemptions:
            now_s = time.monotonic()
            self._costs.computed(account.computed_tokens, now_s - turn.runs_since_s, now_s=now_s)
        answer = account.answer()
        if (token_ids := requests.token_ids_asked_for(request)) is not None:
            answer["prompt_token_ids"] = token_ids
        return {wire.KEY: answer}

    @staticmethod
    def _tell(level: int, request: Request, account: Account) -> None:
        """One log line; its text is only made where somebody reads it."""
        if logger.isEnabledFor(level):
            logger.log(level, "bidikv: request %s %s", request.request_id, account.describe())

    def _count(self, account: Account) -> None:
        self._stats.record("readbacks", 1, str(account.reason))
        self._stats.record("prompt_tokens", account.remote_tokens, "remote")
        self._stats.record("prompt_tokens", account.local_tokens, "local")
        self._stats.record("prompt_tokens", account.computed_tokens, "computed")

    def close(self) -> None:
        """Stop the lookup client. Idempotent."""
        self._client.close()
