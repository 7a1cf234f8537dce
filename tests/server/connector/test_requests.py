"""Facts about vLLM's requests: what ended how, and what of it can be believed."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="a request's status is vLLM's", exc_type=ImportError)
from vllm.v1.request import RequestStatus

from bidikv_server.connector import requests


def ended(status=RequestStatus.FINISHED_ABORTED, *, outputs=3, stop=("END",)):
    sampling = None if stop is None else SimpleNamespace(stop=list(stop))
    return SimpleNamespace(status=status, num_output_tokens=outputs, sampling_params=sampling)


def test_an_aborted_request_with_a_stop_string_may_have_met_it():
    """The engine cannot tell; what it generated is true either way."""
    assert requests.may_have_met_a_stop_string(ended())


@pytest.mark.parametrize(
    "request_",
    [
        ended(
            outputs=0
        ),  # Its prompt's KV may still be on its way from prefill, though vLLM counts it as computed.
        ended(stop=()),
        ended(stop=None),
        ended(RequestStatus.FINISHED_ERROR),
        ended(RequestStatus.FINISHED_IGNORED),
        ended(RequestStatus.FINISHED_STOPPED),
    ],
)
def test_every_other_end_has_met_none(request_):
    """Before the first output, without stop strings, or ended by something else."""
    assert not requests.may_have_met_a_stop_string(request_)


@pytest.mark.parametrize(
    ("content", "believed"),
    [
        ("a" * 64, True),
        ("0123456789abcdef" * 8, True),
        ("my adapter: v2:" + "b" * 64, True),
        ("renderer0-mm-3-image-0", False),
        ("a" * 63, False),
        ("A" * 64, False),
        ("a" * 64 + "-image-0", False),
        ("", False),
    ],
)
def test_only_content_hashes_of_media_are_believed(content, believed):
    """VLLM may number media, and a client may name them; neither says what is in them."""
    place = SimpleNamespace(offset=0, length=4)
    request = SimpleNamespace(
        prompt_token_ids=[1],
        prompt_embeds=None,
        lora_request=None,
        mm_features=[SimpleNamespace(identifier=content, mm_position=place)],
        resumable=False,
        pooling_params=None,
    )
    assert requests.provable(request) == believed


def identity(speculation):
    model = SimpleNamespace(
        model="m",
        revision=None,
        dtype="float32",
        quantization=None,
        get_head_size=lambda: 64,
        get_total_num_kv_heads=lambda: 2,
        get_total_num_hidden_layers=lambda: 2,
        hf_overrides=None,
        multimodal_config=None,
    )
    cache = SimpleNamespace(cache_dtype="auto")
    config = SimpleNamespace(model_config=model, cache_config=cache, speculative_config=speculation)
    return requests.engine_identity(config, 32)


def test_only_speculation_with_kv_of_its_own_tells_engines_apart():
    """Decode may draft from n-grams while prefill does not."""
    ngram, draft = (SimpleNamespace(uses_draft_kv_cache=lambda keeps=keeps: keeps) for keeps in (False, True))
    assert identity(None) == identity(ngram) != identity(draft)
