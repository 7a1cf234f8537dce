"""A checkpoint so small that two cores can serve prompts of hundreds of thousands of tokens; its answers mean nothing."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from bidikv_server.launch.model import prepare_smollm2

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY: Final = 49152
"""SmolLM2's, whose tokenizer it borrows."""


def write(folder: Path, max_tokens: int) -> Path:
    """Save a one-layer Llama with random weights and one small attention head."""
    import torch  # noqa: PLC0415  (slow to import)
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_tokens,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    for file in prepare_smollm2().glob("*token*"):
        shutil.copy(file, folder)
    return folder
