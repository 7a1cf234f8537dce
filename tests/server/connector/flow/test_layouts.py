"""Which KV cache layouts are read back: vLLM's own functions build the configurations, ours must know every one of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_core import BLOCK, Engine, text, unused_port, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from bidikv_server import wire
from bidikv_server.connector import messages
from bidikv_server.connector.requests import layout_objection, parallel_objection
from bidikv_server.connector.side_channel import Client

HEADS = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
MAMBA = MambaSpec(
    block_size=BLOCK, shapes=((64, 16),), dtypes=(torch.float32,), page_size_padded=FULL.page_size_bytes
)

SUPPORTED = {
    "full attention": [FULL, FULL],
    "full attention, other head sizes": [FULL, replace(FULL, head_size=32, head_size_v=32)],
    "MLA": [MLA, MLA],
}
REFUSED = {
    "sliding window only": ([WINDOW, WINDOW], "SlidingWindowSpec"),
    "full and sliding window": ([FULL, WINDOW], "2 KV cache groups"),
    "chunked local only": ([CHUNKED, CHUNKED], "ChunkedLocalAttentionSpec"),
    "full and chunked local": ([FULL, CHUNKED], "2 KV cache groups"),
    "Mamba only": ([MAMBA, MAMBA], "MambaSpec"),
    "full attention and Mamba": ([FULL, MAMBA], "2 KV cache groups"),
    "cross attention": ([FULL, CrossAttentionSpec(**HEADS)], "2 KV cache groups"),
}
UNIFIED = {"full and sliding window": [FULL, WINDOW], "full and chunked local": [FULL, CHUNKED]}


@pytest.fixture
def config(checkpoint):
    """An engine's configuration, readback on; `role` and vLLM's settings vary."""

    def config(role="prefill", **settings):
        extra = {"bidikv": {"role": role, "index_port": unused_port("127.0.0.1")}}
        return vllm_config(
            checkpoint, extra=extra, kv_role="kv_both" if role == "prefill" else "kv_consumer", **settings
        )

    return config


def laid_out(config, specs, *, hybrid=True):
    """What vLLM's engine core gives its scheduler for a model with these layers."""
    config.cache_config.kv_cache_layout = "LBHNC"
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    layers = {f"layer {number}": spec for number, spec in enumerate(specs)}
    groups = get_kv_cache_groups(config, layers)
    return generate_scheduler_kv_cache_config([get_kv_cache_config_from_groups(config, groups, 64 << 20)])


@pytest.mark.parametrize("specs", SUPPORTED.values(), ids=SUPPORTED.keys())
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid allocator", "no hybrid allocator"])
def test_layouts_whose_blocks_depend_on_their_prefix_alone_are_supported(config, specs, hybrid):
    """One group of layers, every block kept, each a function of the tokens up to its end."""
    assert layout_objection(laid_out(config(), specs, hybrid=hybrid)) is None


@pytest.mark.parametrize(("specs", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_other_layouts_are_refused_with_a_reason(config, specs, why):
    """The reason names what is in the way."""
    assert why in layout_objection(laid_out(config(), specs))


@pytest.mark.parametrize("specs", UNIFIED.values(), ids=UNIFIED.keys())
def test_local_layers_that_keep_every_block_are_supported(config, specs):
    """Without the hybrid allocator vLLM allocates local layers like full ones; each block is still its prefix's function."""
    assert layout_objection(laid_out(config(), specs, hybrid=False)) is None


def test_layers_that_look_ahead_are_refused(config):
    """A prefix language model's block depends on later tokens of the prompt, so equal prefixes prove nothing."""
    assert layout_objection(laid_out(config(), [replace(FULL, non_causal=True)] * 2)) is not None


def test_windows_over_generated_tokens_are_refused(config):
    """Reference sliding window: what decode generates sees less than the same tokens as part of a prompt do."""
    assert layout_objection(laid_out(config(), [RSWASpec(**HEADS, rswa_window=64)] * 2)) is not None


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_with_a_reason(config, name):
    """A block's tokens are spread over ranks."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    assert parallel_objection(SimpleNamespace(parallel_config=SimpleNamespace(**parallel))) is None
    parallel[name] = 2
    assert "context parallelism" in parallel_objection(
        SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
    )


@pytest.fixture
def engine(config):
    """Start engines whose layers are not supported."""
    engines = []

    def start(role, specs):
        settings = config(role)
        layout = laid_out(settings, specs)
        settings.cache_config.num_gpu_blocks = layout.num_blocks
        engines.append(Engine(settings, {}, layout=layout))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


LEGS = {"prefill": wire.prefill_leg(conversation="c", salt="s", sources=["127.0.0.1:9"])}


@pytest.mark.parametrize("specs", [specs for specs, _ in REFUSED.values()][:6], ids=list(REFUSED)[:6])
def test_prefill_with_a_refused_layout_says_so_per_request(engine, specs):
    """Nobody is asked and nothing pulled; the account says why, and the prompt is computed."""
    prefill = engine("prefill", specs)
    answer = prefill.finish(prefill.add(text(1, 100), 1, dict(LEGS["prefill"])))
    # vLLM keeps the last token of a prompt from a state-space prefill, and counts blocks outside a chunk as cached.
    assert answer.reuse[:2] == ("unsupported", 0)
    assert prefill.transport.pairs == {}


@pytest.mark.parametrize("specs", [specs for specs, _ in REFUSED.values()][:6], ids=list(REFUSED)[:6])
def test_decode_with_a_refused_layout_retains_nothing(engine, specs):
    """Whoever asks is told so at once, and every block is free when the request has ended."""
    decode = engine("decode", specs)
    free = decode.free_blocks
    leg = wire.decode_leg({}, conversation="c", salt="s", retain_s=60.0)
    decode.finish(decode.add(text(1, 100), 20, leg))
    decode.drain()
    decode.idle(2)
    assert decode.side._decode is None
    assert decode.free_blocks == free
    client = Client()
    try:
        question = messages.encode(messages.Lookup(messages.VERSION, "identity", "c", b""))
        reply = client.submit(decode.side._config.listen_address(0), question, timeout_s=10).result()
    finally:
        client.close()
    assert "retains nothing" in messages.decode(reply).message


def test_a_host_buffer_is_refused_with_a_reason(config, monkeypatch, caplog):
    """Blocks staged in host memory on an accelerator: nothing is read back, and the log says why (F6b)."""
    monkeypatch.setattr(base_scheduler, "current_platform", SimpleNamespace(device_type="cuda"))
    settings = config("prefill")
    settings.kv_transfer_config.kv_buffer_device = "cpu"
    prefill = Engine(settings, {})
    try:
        request = prefill.add(text(1, 100), 1, dict(LEGS["prefill"]))
        assert prefill.finish(request).reuse == ("unsupported", 0, 0, 100)
    finally:
        prefill.close()
    assert "host memory" in caplog.text
