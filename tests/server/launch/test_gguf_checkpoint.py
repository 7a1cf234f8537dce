"""The translation from GGUF to a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from bidikv_server.launch.gguf_checkpoint import (
    UnsupportedGgufError,
    checkpoint_config,
    checkpoint_name,
    unpermute,
)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
    ],
)
def test_tensors_get_the_checkpoints_names(tensor, name):
    """One by one, with the layer's number."""
    assert checkpoint_name(tensor) == name


@pytest.mark.parametrize("tensor", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.x.attn_q.weight"])
def test_an_unknown_tensor_stops_the_conversion(tensor):
    """A model with parts that we would lose is not converted."""
    with pytest.raises(UnsupportedGgufError, match=tensor):
        checkpoint_name(tensor)


def test_unpermuting_undoes_ggufs_order():
    """GGUF interleaves the two halves of each head's rows."""
    heads, rows = 2, 6
    original = np.arange(heads * rows * 3).reshape(heads * rows, 3)
    interleaved = original.reshape(heads, 2, rows // 2, 3).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(interleaved, original)
    assert np.array_equal(unpermute(interleaved, heads), original)


def test_another_architecture_is_refused():
    """The converter knows one kind of file and says so about others."""
    with pytest.raises(UnsupportedGgufError, match="qwen2"):
        checkpoint_config({"general.architecture": "qwen2", "tokenizer.ggml.pre": "qwen2"})
