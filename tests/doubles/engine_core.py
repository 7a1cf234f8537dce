"""vLLM's real scheduler and block pool around a device and a transport that are made up.

The device's memory can be wrong: a slot holds a number that only the right tokens in the right order produce, and a token
is sampled from everything that a request's block table shows. So one wrong block gives another answer, as with a model.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bidikv_server import wire
from bidikv_server.connector.metadata import BidiConnectorMetadata, ReadbackOutcomes
from bidikv_server.connector.nixl_agent import READBACK_PREFIX
from bidikv_server.connector.side_channel import Client
from bidikv_server.connector.worker import BidiConnectorWorker, _Reading
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

BLOCK = 16
VOCABULARY = 30_000
MAX_LEN = 1024
PATIENCE_S = 20.0
"""Longest time that anything outside the scheduler (the side channel's threads) may take; nothing waits for it to pass."""


def unused_port(host: str = "127.0.0.1", *, row: int = 1) -> int:
    """The first of `row` TCP ports that nothing listens on, outside the range that the kernel gives to connections.

    Raises:
        OSError: The host has no such address, or no such ports.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem = OSError("no free ports")
    for _ in range(100):
        # Hypothesis seeds the usual generator, so two sessions would pick the same port.
        first = random.SystemRandom().randrange(18_000, 32_000 - row)
        try:
            for port in range(first, first + row):
                with socket.socket(family) as probe:
                    probe.bind((host, port))
        except OSError as error:
            problem = error
        else:
            return first
    raise problem


def mix(*numbers: int) -> int:
    """A number that depends on all of `numbers` and their order; the same in every process."""
    return hash(numbers)


def cold(prompt: Sequence[int], count: int) -> list[int]:
    """What an engine answers that computes everything itself."""
    seen, tokens = 0, list(prompt)
    for position in range(len(prompt) + count - 1):
        seen = mix(seen, mix(seen, tokens[position]))
        if position >= len(prompt) - 1:
            tokens.append(seen % VOCABULARY)
    return tokens[len(prompt) :]


def text(seed: int, length: int) -> list[int]:
    """A prompt like no other seed's."""
    return [mix(seed, position) % VOCABULARY for position in range(length)]


@dataclass
class _Sequence:
    tokens: list[int]
    block_ids: list[int]


class Device:
    """KV memory and a model. `execute` runs one step of the scheduler's plan."""

    def __init__(self, blocks: int) -> None:
        self.memory = [[0] * BLOCK for _ in range(blocks)]
        self._sequences: dict[str, _Sequence] = {}
        self.drafter: Callable[[list[int]], list[int]] = lambda _: []

    def shows(self, block_ids: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether blocks hold the KV of exactly these tokens."""
        seen = 0
        for position, token in enumerate(tokens):
            slot = mix(seen, token)
            if self.memory[block_ids[position // BLOCK]][position % BLOCK] != slot:
                return False
            seen = mix(seen, slot)
        return True

    def table(self, request_id: str) -> list[int]:
        """The blocks that a request had when it ran last."""
        return list(self._sequences[request_id].block_ids)

    def execute(self, plan: Any) -> dict[str, list[int]]:
        """Write the step's KV; sampled tokens by request."""
        starts: dict[str, int] = {}
        for new in plan.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._sequences[new.req_id] = _Sequence(list(tokens), list(new.block_ids[0]))
            starts[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for request_id, grown, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                sequence.block_ids = list(grown[0])
                sequence.tokens = list(cached.all_token_ids[request_id])
            elif grown:
                sequence.block_ids += grown[0]
            starts[request_id] = start
        drafts = plan.scheduled_spec_decode_tokens
        return {
            request_id: self._run(
                self._sequences[request_id], starts[request_id], count, drafts.get(request_id, [])
            )
            for request_id, count in plan.num_scheduled_tokens.items()
        }

    def _run(self, sequence: _Sequence, start: int, count: int, drafts: list[int]) -> list[int]:
        known = len(sequence.tokens)
        tokens = sequence.tokens + list(drafts)
        seen = 0
        for position in range(start):
            seen = mix(seen, self._slot(sequence, position))
        after: dict[int, int] = {}
        for position in range(start, start + count):
            slot = mix(seen, tokens[position])
            self.memory[sequence.block_ids[position // BLOCK]][position % BLOCK] = slot
            seen = mix(seen, slot)
            after[position] = seen % VOCABULARY
        sampled: list[int] = []
        for position in range(known - 1, start + count):
            sampled.append(after[position])
            if position + 1 >= len(tokens) or tokens[position + 1] != after[position]:
                break
        sequence.tokens += sampled
        return sampled

    def _slot(self, sequence: _Sequence, position: int) -> int:
        return self.memory[sequence.block_ids[position // BLOCK]][position % BLOCK]

    def draft(self, request_id: str) -> list[int]:
        """What the drafter proposes next."""
        return self.drafter(self._sequences[request_id].tokens)


@dataclass
class Transfer:
    """One read of another engine's blocks."""

    request_id: str
    local: list[int]
    remote: list[int]
    engine_id: str
    notify: str
    reading: _Reading | None
    copied: bool = False


class Transport:
    """One rank's worker side: what NIXL's does with a step's metadata, and ours with its readbacks.

    Attributes:
        hold: `read`: no byte moves. `validation`: bytes move, but the index is not asked yet. `overdue`: as `read`, but the
            bound is over, so reads are given up; their bytes arrive when it is lifted, whatever became of the request.
        failing: Reads into this engine end in an error.
        skew_s: Time that has passed on this rank's clock but nowhere else.
        pairs: Every read so far: local block and the remote block read into it, by request.
    """

    def __init__(self, engine: Engine, *, moves_bytes: bool = True) -> None:
        self._engine = engine
        self._moves_bytes = moves_bytes
        self._client = Client()
        self.hold: str | None = None
        self.failing = False
        self.skew_s = 0.0
        self.pairs: dict[str, list[tuple[int, int]]] = {}
        self.reads: list[Transfer] = []
        self.overdue: list[Transfer] = []
        self.sending: dict[str, float] = {}
        self._in_batch: set[str] = set()
        self._sent: set[str] = set()

    def start(self, meta: Any) -> None:
        """Take one step's metadata, in the order of `NixlPullConnectorWorker.start_load_kv`; bytes may move at once."""
        checks = meta.readbacks if isinstance(meta, BidiConnectorMetadata) else {}
        for request_id, request in meta.reqs_to_recv.items():
            self._start_read(request_id, request, checks.get(request_id))
        self._in_batch |= meta.reqs_in_batch
        self._in_batch -= meta.reqs_not_processed
        for request_id, expiry in meta.reqs_to_send.items():
            if request_id in self._in_batch:
                # The lease begins now, on this rank's clock: what has passed on it before is not part of it.
                self.sending[request_id] = expiry + self.skew_s
        for read in self.reads:
            self._copy(read)

    def _start_read(self, request_id: str, request: Any, check: Any) -> None:
        local = list(request.local_block_ids[0]) if request.local_block_ids else []
        remote = list(request.remote.block_ids[0]) if request.remote.block_ids else []
        if not local:
            self._notify(request.remote.engine_id, request.remote.request_id)
            return
        trim = NixlBaseConnectorWorker._apply_prefix_caching  # vLLM's own pairing, by position
        (local,), (remote,) = trim(SimpleNamespace(_has_mamba=False), (local,), (remote,), 1, 1)
        self.pairs[request_id] = list(zip(local, remote, strict=True))
        request.local_physical_block_ids = (local,)
        clocks = SimpleNamespace(_engine_clock_offset={request.remote.engine_id: self.skew_s})
        if NixlPullConnectorWorker._is_turn2_read_expired(clocks, request):
            remote = []
        reading = None if check is None else _Reading(check, time.monotonic() + check.timeout_s)
        self.reads.append(
            Transfer(request_id, local, remote, request.remote.engine_id, request.remote.request_id, reading)
        )

    def _notify(self, engine_id: str, request_id: str) -> None:
        peer = self._engine.peers.get(engine_id)
        if peer is not None and self._moves_bytes and not request_id.startswith(READBACK_PREFIX):
            for transport in peer.transports:
                transport._read_by_peer(request_id)

    def _read_by_peer(self, request_id: str) -> None:
        if request_id in self._in_batch:
            self._in_batch.discard(request_id)
            self.sending.pop(request_id, None)
            self._sent.add(request_id)

    def poll(self) -> KVConnectorOutput:
        """What ended since the last call."""
        now = time.perf_counter() + self.skew_s
        for request_id in [r for r, expiry in self.sending.items() if expiry <= now]:
            self._read_by_peer(request_id)
        output = KVConnectorOutput(finished_sending=self._sent or None)
        self._sent = set()
        outcomes = ReadbackOutcomes()
        if self.hold != "overdue":
            for read in self.overdue:
                self._copy(read)
                outcomes.unstuck[read.request_id] += 1
            self.overdue = []
        done, failed, invalid = set(), set(), set()
        for read in list(self.reads):
            outcome = self._advance(read)
            if outcome is None:
                continue
            self.reads.remove(read)
            done.add(read.request_id)
            if outcome is not Reason.HIT:
                failed.add(read.request_id)
                invalid |= set(read.local)
            if self.hold == "overdue":
                self.overdue.append(read)
                outcomes.stuck[read.request_id] += 1
            if read.reading is not None:
                outcomes.outcomes[read.request_id] = outcome
        output.finished_recving = done or None
        output.failed_recving, output.invalid_block_ids = failed, invalid
        output.kv_connector_worker_meta = outcomes if outcomes != ReadbackOutcomes() else None
        return output

    def _copy(self, read: Transfer) -> None:
        peer = self._engine.peers.get(read.engine_id)
        if read.copied or self.hold in {"read", "overdue"} or self.failing or peer is None or not read.remote:
            return
        if self._moves_bytes:
            for into, block_id in zip(read.local, read.remote, strict=True):
                self._engine.device.memory[into] = list(peer.device.memory[block_id])
        self._notify(read.engine_id, read.notify)
        read.copied = True

    def _advance(self, read: Transfer) -> Reason | None:
        self._copy(read)
        if not read.copied:
            return None if self.hold == "read" else Reason.TRANSFER_FAILED
        if read.reading is None:
            return Reason.HIT
        if self.hold == "validation":
            return None
        if read.reading.verdict is None:
            BidiConnectorWorker._ask(SimpleNamespace(_client=self._client), read.reading, time.monotonic())
        if not read.reading.verdict.done():
            return None
        confirmed = BidiConnectorWorker._confirmed(read.reading.verdict)
        return Reason.HIT if confirmed else Reason.VALIDATION_FAILED

    def verdicts(self) -> list[Any]:
        """Answers of an index that are still awaited."""
        found = [read.reading.verdict for read in self.reads if read.reading is not None]
        return [verdict for verdict in found if verdict is not None and not verdict.done()]

    def close(self) -> None:
        self._client.close()


@dataclass
class Answer:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    params: dict[str, Any] | None = None

    @property
    def account(self) -> dict[str, Any]:
        """Prefill's account of its reuse."""
        return (self.params or {})[wire.KEY]

    @property
    def reuse(self) -> tuple[str, int, int, int]:
        """Reason, and tokens from decode, from prefill's own cache and computed."""
        account = self.account
        assert (
            sum(account[f"{kind}_tokens"] for kind in ("remote", "local", "computed"))
            == account["prompt_tokens"]
        )
        return (
            account["reason"],
            account["remote_tokens"],
            account["local_tokens"],
            account["computed_tokens"],
        )


class Engine:
    """One engine core: `add` requests, then `step`. Everything that the scheduler decides is vLLM's own doing."""

    _numbers = itertools.count()

    def __init__(
        self,
        config: VllmConfig,
        peers: dict[str, Engine],
        *,
        ranks: int = 1,
        layout: KVCacheConfig | None = None,
    ) -> None:
        init_none_hash(sha256)
        blocks = config.cache_config.num_gpu_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.config, self.peers = config, peers
        asynchronous = config.scheduler_config.async_scheduling
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=layout
            or KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self._depth = config.max_concurrent_batches
        self._under_way: deque[Any] = deque()
        self.device = Device(blocks)
        self.transports = [Transport(self, moves_bytes=rank == 0) for rank in range(ranks)]
        self._aggregator = KVOutputAggregator(ranks)
        self.answers: dict[str, Answer] = {}
        self.preemptions = 0
        self.events: list[list[Any]] = []
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.engine_id = config.kv_transfer_config.engine_id
        peers[self.engine_id] = self

    @property
    def transport(self) -> Transport:
        """The only rank's, or the first one's."""
        return self.transports[0]

    @property
    def side(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector.connector_scheduler

    @property
    def pool(self) -> Any:
        """The block pool, vLLM's own."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        """Blocks that a request could have now."""
        return self.pool.get_num_free_blocks()

    def add(
        self,
        prompt: Sequence[int],
        count: int,
        params: dict[str, Any] | None,
        *,
        name: str | None = None,
        **fields: Any,
    ) -> str:
        """Queue a request; `fields` are vLLM's `Request`'s, except `sampling`."""
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, extra_args=extra, **fields.pop("sampling", {})
        )
        sampling.update_from_generation_config({}, 0)
        request_id = name or f"r{next(self._numbers)}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
            **fields,
        )
        self.answers[request_id] = Answer()
        self.scheduler.add_request(request)
        return request_id

    def request(self, request_id: str) -> Request:
        """A request that the scheduler still knows."""
        return self.scheduler.requests[request_id]

    def blocks(self, request_id: str) -> list[int]:
        """The blocks of a request."""
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]

    def hashed(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks that the prefix cache would hand to another request."""
        return [block_id for block_id in block_ids if self.pool.blocks[block_id].block_hash is not None]

    def step(self) -> None:
        """One engine step. With asynchronous scheduling the device is as late as it can be."""
        plan = self.scheduler.schedule()
        for transport in self.transports:
            transport.start(plan.kv_connector_metadata)
        self._under_way.append(plan)
        if len(self._under_way) >= self._depth or not plan.total_num_scheduled_tokens:
            while self._under_way:
                self._process(self._under_way.popleft())
                if plan.total_num_scheduled_tokens:
                    break

    def _process(self, plan: Any) -> None:
        sampled = self.device.execute(plan)
        request_ids = list(plan.num_scheduled_tokens)
        outputs = [
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=[sampled[request_id] for request_id in request_ids],
                kv_connector_output=transport.poll(),
            )
            for transport in self.transports
        ]
        output = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        before = {request.request_id: request.num_preemptions for request in self.scheduler.requests.values()}
        self._take(self.scheduler.update_from_output(plan, output))
        self.preemptions = max([self.preemptions, *before.values()])
        if self.config.num_speculative_tokens:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(request_ids, [self.device.draft(request_id) for request_id in request_ids])
            )

    def _take(self, outputs: dict[int, Any]) -> None:
        for client in outputs.values():
            for output in client.outputs:
                answer = self.answers[output.request_id]
                answer.tokens += output.new_token_ids
                if output.finish_reason is not None:
                    answer.finish, answer.params = str(output.finish_reason), output.kv_transfer_params
            stats = client.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.events += stats.kv_connector_stats.get("bidikv_events", [])

    def counted(self, metric: str) -> dict[str, float]:
        """Totals of one of the connector's metrics, by label."""
        totals: dict[str, float] = {}
        for name, label, value in self.events:
            if name == metric:
                totals[label] = totals.get(label, 0) + value
        return totals

    def run(self, *, until: Callable[[], bool], steps: int = 100) -> None:
        """Step until something holds; fails after `steps` steps: nothing may wait for ever."""
        for _ in range(steps):
            if until():
                return
            self.step()
            self.settle()
        assert until(), f"not within {steps} steps: {self.scheduler.requests}"

    def finish(self, *request_ids: str, steps: int = 100) -> Answer:
        """Step until these requests have ended; the last one's answer."""
        self.run(until=lambda: all(self.answers[r].finish for r in request_ids), steps=steps)
        return self.answers[request_ids[-1]]

    def drain(self, steps: int = 100) -> None:
        """Step until the scheduler has forgotten every request."""
        self.run(until=lambda: not self.scheduler.requests, steps=steps)

    def idle(self, steps: int) -> None:
        """Step so many times, whatever happens."""
        for _ in range(steps):
            self.step()
            self.settle()

    def settle(self) -> None:
        """Let the side channel's threads answer what has been asked, so that a step is never spent on waiting."""
        asked = [future for transport in self.transports for future in transport.verdicts()]
        prefill = getattr(self.side, "_prefill", None)
        if prefill is not None:
            lookups = [turn.lookup for turn in prefill._turns.values() if turn.lookup is not None]
            asked += [future for lookup in lookups for _, future in lookup._asked]
        wait(asked, timeout=PATIENCE_S)

    def abort(self, request_id: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def status(self, request_id: str) -> RequestStatus:
        """A request's status."""
        return self.request(request_id).status

    def close(self) -> None:
        """Stop every thread and release the index port."""
        self.peers.pop(self.engine_id, None)
        for transport in self.transports:
            transport.close()
        self.scheduler.shutdown()


def write_model(folder: Path) -> Path:
    """A checkpoint's configuration, as small as vLLM takes it; no weights and no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "num_hidden_layers": 1,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": MAX_LEN,
                "torch_dtype": "float32",
            }
        )
    )
    return folder


def vllm_config(
    model: Path,
    *,
    extra: dict[str, Any],
    connector: str = "BidiNixlConnector",
    kv_role: str = "kv_both",
    policy: str = "recompute",
    blocks: int = 64,
    batch: int = MAX_LEN,
    seqs: int = 16,
    caching: bool = True,
    asynchronous: bool = False,
    drafts: int = 0,
    dtype: str = "float32",
    **parallel: Any,
) -> VllmConfig:
    """An engine's configuration, as vLLM's own argument parser would make it."""
    ours = connector == "BidiNixlConnector"
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="bidikv_server.connector" if ours else None,
        kv_role=kv_role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
    )
    cache = CacheConfig(block_size=BLOCK, cache_dtype="auto", enable_prefix_caching=caching)
    cache.num_gpu_blocks = blocks
    speculation = {
        "model": "ngram",
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_max": 2,
    }
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype=dtype, max_model_len=MAX_LEN, seed=0
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=batch,
            max_model_len=MAX_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        kv_transfer_config=transfer,
        speculative_config=None,
    )
    if drafts:
        config.speculative_config = SpeculativeConfig(
            **speculation,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    # vLLM's CPU platform has no overlapping steps; ours are made up anyway.
    config.scheduler_config.async_scheduling = asynchronous
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return config


class Pair:
    """A prefill and a decode engine, and what a router would write into their requests.

    `stock` engines have vLLM's own connector with `bidirectional_kv_xfer`; decode's answer is then sent on to prefill as
    vLLM's example proxy does it.
    """

    SALT = "tenant"

    def __init__(
        self,
        model: Path,
        *,
        port: int,
        stock: bool = False,
        host: str = "127.0.0.1",
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        ranks: int = 1,
        threshold: int = BLOCK,
        **both: Any,
    ) -> None:
        self.peers: dict[str, Engine] = {}
        self.stock = stock
        self.source = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._model, self._decode_settings = model, both | (decode or {})
        common = {"kv_recompute_threshold": threshold}
        settings = both | (prefill or {})
        ours = settings.pop("bidikv", {})
        if stock:
            self._extra = common | {"bidirectional_kv_xfer": True}
            settings = {"connector": "NixlConnector", "extra": self._extra} | settings
        else:
            settings = {
                "extra": common | {"bidikv": {"role": "prefill", "lookup_timeout_s": PATIENCE_S} | ours}
            } | settings
        self.prefill = Engine(vllm_config(model, **settings), self.peers, ranks=ranks)
        self._index = {"role": "decode", "index_port": port, "index_host": host}
        self.decode = self._start_decode()
        self.decoded = ""

    def _start_decode(self) -> Engine:
        settings = dict(self._decode_settings)
        ours = settings.pop("bidikv", {})
        ttl_s = settings.pop("ttl_s", 480.0)
        if self.stock:
            settings = {"connector": "NixlConnector", "extra": self._extra} | settings
        else:
            settings = {
                "kv_role": "kv_consumer",
                "extra": {"bidikv": self._index | ours, "decoder_kv_blocks_ttl": ttl_s},
            } | settings
        return Engine(vllm_config(self._model, **settings), self.peers)

    def restart_decode(self) -> None:
        """Another start of decode on the same index port: new memory, new engine id."""
        self.decode.close()
        self.decode = self._start_decode()

    def ask(
        self,
        prompt: Sequence[int],
        *,
        conversation: str = "c",
        sources: list[str] | None = None,
        handle: dict[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Queue the prefill leg of a turn; `handle` is what stock decode returned for the turn before."""
        if self.stock:
            params = dict(handle or wire.NOTHING_TO_PULL)
        else:
            params = wire.prefill_leg(
                conversation=conversation,
                salt=self.SALT,
                sources=[self.source] if sources is None else sources,
            )
        return self.prefill.add(prompt, 1, params, **fields)

    def reply(
        self,
        prompt: Sequence[int],
        count: int,
        answer: Answer,
        *,
        conversation: str = "c",
        retain_s: float = 60.0,
        protect: bool = False,
        release: bool = False,
        **fields: Any,
    ) -> str:
        """Queue the decode leg of a turn."""
        params = dict(answer.params or {})
        if not self.stock:
            params = wire.decode_leg(
                params,
                conversation=conversation,
                salt=self.SALT,
                retain_s=retain_s,
                protect=protect,
                release=release,
            )
        return self.decode.add(prompt, count, params, **fields)

    def decode_alone(self, prompt: Sequence[int], count: int, **ours: Any) -> str:
        """Queue a turn that no prefill engine helps with."""
        return self.decode.add(prompt, count, self.decode_params(**ours))

    def decode_params(self, **ours: Any) -> dict[str, Any]:
        """The router's words to decode about retention, and nothing else."""
        leg = wire.decode_leg({}, conversation="c", salt=self.SALT, retain_s=60.0)[wire.KEY]
        return {wire.KEY: leg | ours}

    def turn(
        self, prompt: Sequence[int], count: int = 40, *, handle: dict[str, Any] | None = None, **reply: Any
    ) -> tuple[Answer, Answer]:
        """A whole turn, nothing else going on: prefill's and decode's answers."""
        conversation = reply.pop("conversation", "c")
        first = self.prefill.finish(self.ask(prompt, conversation=conversation, handle=handle))
        self.decoded = self.reply(prompt, count, first, conversation=conversation, **reply)
        second = self.decode.finish(self.decoded)
        self.quiet()
        return first, second

    def quiet(self) -> None:
        """Let prefill hear that decode has read, and decode let go of what it retains."""
        for engine in (self.prefill, self.decode):
            engine.idle(2)

    def pass_time(self, seconds: float) -> None:
        """Let the transports' clocks, by which stock leases and TTLs run, go on."""
        for engine in self.peers.values():
            for transport in engine.transports:
                transport.skew_s += seconds

    def abandon(self) -> None:
        """Nobody reads what prefill has computed: let its leases end."""
        self.prefill.idle(1)
        self.pass_time(31)
        self.prefill.drain()

    def forget(self) -> None:
        """Empty prefill's own cache, as other conversations would in time."""
        self.prefill.drain()
        assert self.prefill.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Stop both engines."""
        self.prefill.close()
        self.decode.close()
