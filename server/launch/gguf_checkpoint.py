"""Writes a Llama-shaped GGUF file out as a Hugging Face checkpoint folder with float32 weights.

Done with the `gguf` package alone, because transformers' own GGUF loader asks for `accelerate` as well.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_TOP_LEVEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.weight")
_CONTROL_TOKEN: Final = 3


class UnsupportedGgufError(ValueError):
    """The file is not the kind of model this converter was written for."""


def convert(source: Path, target: Path, *, chat_template: str, progress: Callable[[str], None]) -> None:
    """Write `source` into the existing folder `target`: weights, config, tokenizer and chat template.

    Raises:
        UnsupportedGgufError: Another architecture or tokenizer than the converter knows.
    """
    from gguf import GGUFReader  # noqa: PLC0415  (an optional extra)

    reader = GGUFReader(str(source))
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = checkpoint_config(facts)
    progress("reading and unpacking the weights")
    _write_weights(reader.tensors, config, target / "model.safetensors")
    progress("writing the tokenizer")
    _write_tokenizer(facts, target, chat_template)
    _write_json(target / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", {**tokens, "_from_model_config": True})


def checkpoint_config(facts: dict[str, Any]) -> dict[str, Any]:
    """Translate the file's metadata into `config.json`."""
    if facts.get("general.architecture") != "llama" or facts.get("tokenizer.ggml.pre") != "smollm":
        raise UnsupportedGgufError(
            f"cannot convert architecture {facts.get('general.architecture')!r} "
            f"with tokenizer {facts.get('tokenizer.ggml.pre')!r}"
        )
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": facts["llama.vocab_size"],
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def checkpoint_name(tensor: str) -> str:
    """Translate one tensor's name."""
    layer = _LAYER_TENSOR.fullmatch(tensor)
    if layer and layer["part"] in _PER_LAYER:
        return f"model.layers.{layer['layer']}.{_PER_LAYER[layer['part']]}.weight"
    top = _TOP_LEVEL.get(tensor.removesuffix(".weight"))
    if top is None:
        raise UnsupportedGgufError(f"unknown tensor {tensor!r}")
    return f"{top}.weight"


def unpermute(weight: Any, heads: int) -> Any:
    """Undo GGUF's interleaving of rotary pairs: each head's rows go back to two halves."""
    rows = weight.shape[0] // heads
    paired = weight.reshape(heads, rows // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _write_weights(tensors: Any, config: dict[str, Any], path: Path) -> None:
    import numpy as np  # noqa: PLC0415
    from gguf.quants import dequantize  # noqa: PLC0415
    from safetensors.numpy import save_file  # noqa: PLC0415

    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    weights: dict[str, Any] = {}
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if part in tensor.name:
                weight = unpermute(weight, count)
        weights[checkpoint_name(tensor.name)] = np.ascontiguousarray(weight, dtype=np.float32)
    save_file(weights, path, metadata={"format": "pt"})


def _write_tokenizer(facts: dict[str, Any], target: Path, chat_template: str) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": facts["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        },
    )
    (target / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
