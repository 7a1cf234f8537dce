"""The vLLM surface the connector relies on. An upgrade that moves any of it fails here, and only here."""

import dataclasses
import inspect
import re

import pytest

pytestmark = pytest.mark.contract

vllm = pytest.importorskip("vllm", reason="the contract is with an installed vLLM", exc_type=ImportError)

from vllm.config import SpeculativeConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (  # noqa: E402
    base_scheduler,
    base_worker,
    connector,
    metadata,
    pull_scheduler,
    pull_worker,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: E402
from vllm.multimodal.hasher import MultiModalHasher  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.renderers.base import BaseRenderer  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine.output_processor import OutputProcessor  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from bidikv_server.connector import requests  # noqa: E402
from bidikv_server.router.core import ids  # noqa: E402
from bidikv_server.versions import vllm_objection  # noqa: E402


def parameters(function):
    return list(inspect.signature(function).parameters)


def source(thing):
    return inspect.getsource(thing)


def test_version_is_the_one_we_support():
    """The rest of this file was run against these versions."""
    assert vllm_objection(vllm.__version__) is None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (connector.NixlPullConnector.__init__, ["self", "vllm_config", "role", "kv_cache_config"]),
        (pull_scheduler.NixlPullConnectorScheduler.__init__, ["self", "vllm_config", "engine_id", "kv_cache_config"]),
        (pull_worker.NixlPullConnectorWorker.__init__, ["self", "vllm_config", "engine_id", "kv_cache_config"]),
        (base.KVConnectorBase_V1.bind_gpu_block_pool, ["self", "gpu_block_pool"]),
        (base.KVConnectorBase_V1.build_connector_worker_meta, ["self"]),
        (base.KVConnectorBase_V1.update_connector_output, ["self", "connector_output"]),
        (base.KVConnectorBase_V1.get_num_new_matched_tokens, ["self", "request", "num_computed_tokens"]),
        (pull_scheduler.NixlPullConnectorScheduler.update_state_after_alloc, ["self", "request", "blocks", "num_external_tokens"]),
        (pull_scheduler.NixlPullConnectorScheduler.request_finished, ["self", "request", "block_ids"]),
        (base_worker.NixlBaseConnectorWorker._pop_done_transfers, ["self", "transfers"]),
        (base_worker.NixlBaseConnectorWorker._try_release_xfer_handle, ["self", "req_id", "handle"]),
        (metadata.NixlConnectorMetadata.add_new_req_to_recv, ["self", "request_id", "local_block_ids", "kv_transfer_params", "local_num_computed_blocks", "awaiting_kvs"]),
        (base_worker.NixlBaseConnectorWorker.add_remote_agent, ["self", "nixl_agent_meta", "remote_tp_rank", "remote_tp_size", "remote_dcp_size"]),
        (SpeculativeConfig.uses_draft_kv_cache, ["self"]),
        (BlockPool.touch, ["self", "blocks"]),
        (BlockPool.unpin_blocks, ["self", "blocks", "on_reuse"]),
        (base.KVConnectorBase_V1.build_prom_metrics, ["vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)  # fmt: skip
def test_hooks_keep_their_signatures(function, expected):
    """Every hook we override or call takes what we give it."""
    assert parameters(function) == expected


def test_pull_params_are_read_under_these_keys():
    """A read built by us reaches the peer that the index named."""
    meta = metadata.NixlConnectorMetadata()
    meta.add_new_req_to_recv(
        request_id="r",
        local_block_ids=([1, 2],),
        kv_transfer_params={
            "remote_block_ids": ([7, 8],),
            "remote_engine_id": "e",
            "remote_request_id": "rr",
            "remote_host": "h",
            "remote_port": 5,
            "remote_num_tokens": 64,
            "tp_size": 2,
            "dcp_size": 1,
            "pp_size": 1,
        },
        local_num_computed_blocks=(0,),
        awaiting_kvs=True,
    )
    req = meta.reqs_to_recv["r"]
    assert (req.remote.engine_id, req.remote.host, req.remote.port) == ("e", "h", 5)
    assert (req.remote.block_ids, req.remote.request_id, req.tp_size) == (([7, 8],), "rr", 2)
    # Without an expiry the stock worker reads without asking the clock; our validation replaces that check.
    assert req.remote.blocks_expiry_time is None


@pytest.mark.parametrize("name", ["_reqs_in_batch", "_reqs_need_save", "use_host_buffer", "transfer_tp_size", "side_channel_host", "side_channel_port", "is_bidirectional_kv_xfer_enabled", "block_size"])  # fmt: skip
def test_scheduler_side_keeps_its_attributes(name):
    """Attributes of the stock scheduler side that ours reads or writes."""
    assert f"self.{name}" in source(base_scheduler.NixlBaseConnectorScheduler.__init__)


@pytest.mark.parametrize(
    "name", ["nixl_wrapper", "_recving_transfers", "_recv_failures", "_recving_metadata"]
)
def test_worker_side_keeps_its_attributes(name):
    """Attributes of the stock worker side that ours reads or writes."""
    assert f"self.{name}" in source(base_worker.NixlBaseConnectorWorker.__init__)


def test_the_nixl_agent_is_not_used_before_memory_is_registered():
    """Our worker exchanges the agent after the stock constructor; nothing may have been registered with it."""
    init = source(base_worker.NixlBaseConnectorWorker.__init__)
    assert init.count("self.nixl_wrapper =") == 1
    # Its sleep mode makes a backend of its own (0.33); our worker refuses to exchange that agent.
    assert set(re.findall(r"self\.nixl_wrapper\.(\w+)", init)) <= {"create_backend"}


def test_failed_reads_come_out_of_pop_done_transfers():
    """A request put among the failures with no handle left is reported as failed, and its blocks as invalid."""
    results = source(base_worker.NixlBaseConnectorWorker.get_transfer_results)
    assert "done_recving, newly_failed = self._pop_done_transfers(self._recving_transfers)" in results
    assert "elif req_id not in self._recving_transfers" in results


def test_failed_reads_are_recomputed_before_anything_is_cached():
    """With kv_load_failure_policy=recompute a failed read leaves no computed token and no cached block behind."""
    assert "request.num_computed_tokens = 0" in source(Scheduler._handle_failed_recving)
    promote = source(Scheduler._update_waiting_for_remote_kv)
    assert promote.index("load_failed") < promote.index("cache_blocks")


def test_the_connector_hears_of_an_ended_read_before_the_scheduler_acts_on_it():
    """Our account of a read is complete when the request runs on."""
    body = source(Scheduler._update_from_kv_xfer_finished)
    assert body.index("update_connector_output") < body.index("finished_recving_kv_req_ids.add")


@pytest.mark.parametrize("name", ["num_in_flight_tokens", "num_computed_tokens", "cache_salt", "lora_request", "mm_features", "prompt_embeds", "resumable", "pooling_params", "sampling_params", "num_output_tokens", "num_preemptions", "kv_transfer_params", "prompt_token_ids"])  # fmt: skip
def test_requests_keep_their_attributes(name):
    """What decides whether a request's blocks can be proven equal."""
    assert hasattr(Request, name) or f"self.{name}" in source(Request.__init__)


def test_worker_metadata_reaches_the_scheduler():
    """The channel over which workers say how reads ended."""
    assert {"kv_connector_worker_meta", "failed_recving", "finished_recving"} <= set(
        KVConnectorOutput.__dataclass_fields__
    )


def pool(num_blocks=8, *, caching=False):
    return BlockPool(num_gpu_blocks=num_blocks, enable_caching=caching, hash_block_size=16)


def test_unpinned_blocks_are_free_but_handed_out_last():
    """Soft retention: readable blocks count as free, and the pool takes every other block first."""
    blocks = pool()
    free = blocks.get_num_free_blocks()
    request = blocks.get_new_blocks(2)
    blocks.touch(request)
    blocks.free_blocks(reversed(request))
    reused = []
    blocks.unpin_blocks(request, lambda block: reused.append(block.block_id))
    assert blocks.get_num_free_blocks() == free
    others = blocks.get_new_blocks(free - 2)
    assert not reused
    assert not {b.block_id for b in others} & {b.block_id for b in request}


def test_reuse_is_announced_before_the_new_owner_has_the_block():
    """The generation moves before anything can be written."""
    blocks = pool()
    request = blocks.get_new_blocks(1)
    blocks.touch(request)
    blocks.free_blocks(request)
    holders = []
    blocks.unpin_blocks(request, lambda block: holders.append(block.ref_cnt))
    blocks.get_new_blocks(blocks.get_num_free_blocks())
    assert holders == [0]


def test_freed_blocks_are_fenced_on_consumers_only():
    """Why a prefill engine that reads back is `kv_both`: vLLM holds freed blocks back from a running step only then."""
    init = source(Scheduler.__init__)
    assert "if multiple_inflight_batches and kv_transfer_config.is_kv_consumer:" in init
    assert "self.vllm_config.max_concurrent_batches > 1" in init


def test_settled_after_the_frees_of_a_step():
    """`take_events` is the hook that runs after vLLM has freed what finished, in every step."""
    body = source(Scheduler.update_from_output)
    assert body.index("_free_request") < body.index("self.connector.take_events()")


def test_a_cache_reset_announces_every_retained_block():
    """Softly retained blocks do not outlive a reset of the prefix cache."""
    blocks = pool()
    request = blocks.get_new_blocks(2)
    blocks.touch(request)
    blocks.free_blocks(request)
    reused = []
    blocks.unpin_blocks(request, lambda block: reused.append(block.block_id))
    assert blocks.reset_prefix_cache()
    assert sorted(reused) == sorted(block.block_id for block in request)


def test_media_are_named_by_their_content():
    """The identifier that our digests fold in is the key of vLLM's own caches, and is a hash or a number as we think."""
    feature = {field.name for field in dataclasses.fields(MultiModalFeatureSpec)}
    assert {"identifier", "mm_position"} <= feature
    assert {"offset", "length"} <= {field.name for field in dataclasses.fields(PlaceholderRange)}
    assert 'f"{mm_req_id}-{modality}-{i}"' in source(BaseRenderer._process_mm_uuids)
    assert "mm_feature.identifier" in source(kv_cache_utils._gen_mm_extra_hash_keys)
    for algorithm in ("blake3", "sha256", "sha512"):
        digest = MultiModalHasher.hash_kwargs(algorithm, model_id="m", image=b"bytes")
        assert requests._CONTENT_HASH.fullmatch(digest)


def test_stop_strings_are_found_outside_the_engine():
    """The engine core gets them with the sampling parameters and ends such a request as aborted."""
    assert "stop" in SamplingParams.__struct_fields__
    assert "reqs_to_abort" in source(OutputProcessor.process_outputs)


def test_a_new_registration_is_read_where_we_write_it():
    """From vLLM 0.33 on, a reader is told how often its peer registered memory anew, under this name."""
    told = "remote_registration_generation" in source(metadata.NixlConnectorMetadata)
    assert told == ("_registration_generation" in source(base_scheduler.NixlBaseConnectorScheduler.__init__))
    assert told == (not vllm.__version__.startswith("0.32."))


@pytest.mark.parametrize(
    ("model", "prompt"), [(ChatCompletionRequest, {"messages": []}), (CompletionRequest, {"prompt": "x"})]
)
def test_tenants_salts_reach_the_prefix_cache(model, prompt):
    """The router's `cache_salt` is one that engines take, and it is part of a prompt's first block's name."""
    salt = ids.cache_salt_of("tenant", "/@\\" * 100)
    assert model.model_validate({"model": "m", "cache_salt": salt, **prompt}).cache_salt == salt
    assert '("cache_salt", request.cache_salt)' in source(kv_cache_utils.generate_block_hash_extra_keys)
