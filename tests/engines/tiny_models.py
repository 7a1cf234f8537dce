"""Tiny checkpoints with random weights, for engine shapes that no packaged model has.

`python tiny_models.py NAME` builds one and prints its folder; `checkpoint(NAME)` does that once per machine, in a
process of its own, so that whoever needs one loads neither torch nor transformers.

The weights are drawn so that an answer depends on the whole prompt: wrong KV has to show. With the usual standard
deviation of 0.02 attention would hardly matter beside the embedding of the last token.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from bidikv_server.launch.model import CARD_FILE, cache_root, prepare_smollm2

SEED = 20260711
CONTEXT = 4096
STD = 0.15
"""For a hidden size of 64: attention scores then spread by about 1.5, and attention outweighs the embedding."""

IMAGE_TOKENS = (49152, 49153, 49154)
"""What the vision model adds to SmolLM2's vocabulary."""
IMAGE_SIZE = 112
PATCH_SIZE = 14
SCALE_FACTOR = 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
BASICS = {
    "vocab_size": IMAGE_TOKENS[0],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": STD,
    "rms_norm_eps": 1e-6,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def checkpoint(name):
    """The folder of one of the models below, built when it is not there yet."""
    folder = _folder(name)
    if not folder.is_dir():
        prepare_smollm2()
        built = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
    return folder


def _folder(name):
    # Another version of this file may build another model.
    key = sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return cache_root() / "tiny" / key / f"tiny-{name}"


def llama():
    """Full attention: small enough for several engines or ranks on two cores."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    return LlamaForCausalLM(LlamaConfig(**BASICS, **HEADS, num_hidden_layers=2))


def gemma3():
    """Sliding-window layers of 128 tokens and full-attention layers, in turn: two KV cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig  # noqa: PLC0415

    config = Gemma3TextConfig(
        **BASICS,
        **HEADS,
        num_hidden_layers=4,
        # Queries and keys are normalised: only this makes attention choose among hundreds of tokens.
        query_pre_attn_scalar=1,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config)


def mistral():
    """Nothing but sliding-window layers of 128 tokens: one KV cache group that is not full attention."""
    from transformers import MistralConfig, MistralForCausalLM  # noqa: PLC0415

    return MistralForCausalLM(MistralConfig(**BASICS, **HEADS, num_hidden_layers=2, sliding_window=128))


def deepseek_v2():
    """Multi-head latent attention in the one shape that vLLM's CPU kernel takes, without experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM  # noqa: PLC0415

    config = DeepseekV2Config(
        **BASICS,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
    )
    return DeepseekV2ForCausalLM(config)


def granite_hybrid():
    """Mamba-2 layers and full-attention layers, in turn."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM  # noqa: PLC0415

    config = GraniteMoeHybridConfig(
        **BASICS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        layer_types=["mamba", "attention"] * 2,
        attention_multiplier=0.5,
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
    )
    return GraniteMoeHybridForCausalLM(config)


def idefics3():
    """A vision model with full attention: an image of any size becomes 16 tokens.

    Most vision models of vLLM 0.32 need torchvision, which the CPU build has to do without; this one does not.
    """
    from transformers import (  # noqa: PLC0415
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3VisionConfig,
        LlamaConfig,
    )

    text = LlamaConfig(**BASICS | {"vocab_size": IMAGE_TOKENS[-1] + 64}, **HEADS, num_hidden_layers=2)
    vision = Idefics3VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        initializer_range=STD,
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=SCALE_FACTOR,
        image_token_id=IMAGE_TOKENS[1],
        tie_word_embeddings=False,
        pad_token_id=BASICS["pad_token_id"],
    )
    return Idefics3ForConditionalGeneration(config)


def _add_image_processor(folder):
    """What the vision model needs beside its weights."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    assert tuple(tokenizer.convert_tokens_to_ids(names)) == IMAGE_TOKENS
    tokenizer.save_pretrained(folder)
    image_processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "rescale_factor": 1 / 255,
        "resample": 1,
        "size": {"longest_edge": IMAGE_SIZE},
        "max_image_size": {"longest_edge": IMAGE_SIZE},
    }
    tokens = (IMAGE_SIZE // PATCH_SIZE // SCALE_FACTOR) ** 2
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": tokens}
    (folder / "preprocessor_config.json").write_text(json.dumps({**image_processor, **processor}))
    (folder / "processor_config.json").write_text(json.dumps(processor))


MODELS = {
    model.__name__.replace("_", "-"): model
    for model in (llama, gemma3, mistral, deepseek_v2, granite_hybrid, idefics3)
}


def build(name):
    """Weights from a fixed seed, SmolLM2's tokenizer and chat template."""
    import torch  # noqa: PLC0415

    torch.manual_seed(SEED)
    model = MODELS[name]().float()
    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    model.save_pretrained(scratch)
    for file in TOKENIZER_FILES:
        shutil.copy(prepare_smollm2() / file, scratch)
    (scratch / CARD_FILE).write_text(json.dumps({"max_model_len": CONTEXT, "tool_calls": "none"}))
    if name == "idefics3":
        _add_image_processor(scratch)
    scratch.rename(folder)
    return folder


if __name__ == "__main__":
    wanted = _folder(sys.argv[1])
    print(wanted if wanted.is_dir() else build(sys.argv[1]))  # noqa: T201
