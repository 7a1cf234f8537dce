"""Facts about a vLLM request that decide whether and how its blocks can be proven equal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

from vllm.v1.request import RequestStatus

from bidikv_server import wire
from bidikv_server.connector.core import digests

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


_ENDED_WELL: Final = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    }
)
_LONGEST_S: Final = 1e9
_LONGEST_KEY: Final = 256
# With both of its caches off vLLM numbers media instead of hashing them, and two engines give the same number to
# different images. (`BaseRenderer._process_mm_uuids`; an adapter's name may stand before the hash.)
_CONTENT_HASH: Final = re.compile(r"(?:.*:)?[0-9a-f]{64,128}", re.DOTALL)


class Recorder(Protocol):
    """Takes note of what happened, for the metrics."""

    def record(self, metric: str, value: float = 1, label: str = "") -> None:
        """Note one event."""


@dataclass(frozen=True, slots=True)
class LegParams:
    """The `bidikv` part of a request's `kv_transfer_params`, checked.

    Attributes:
        conversation: Opaque key.
        salt: Per-tenant secret.
        sources: Retention indexes to ask (prefill leg).
        retain_s: How long to keep the blocks (decode leg); 0 keeps nothing.
        protect: The client said when it comes back: hold the blocks, within the budget.
        release: No turn will follow: forget what the conversation left.
        return_token_ids: Say the prompt's token ids in the account (prefill leg).
    """

    conversation: str
    salt: str
    sources: tuple[str, ...] = ()
    retain_s: float = 0.0
    protect: bool = False
    release: bool = False
    return_token_ids: bool = False

    @classmethod
    def of(cls, request: Request) -> LegParams | None:
        """Read them; None when they are absent or not as the router writes them."""
        params = request.kv_transfer_params
        ours = params.get(wire.KEY) if isinstance(params, Mapping) else None
        if not isinstance(ours, Mapping) or ours.get("v") != wire.VERSION:
            return None
        conversation, salt = ours.get("conversation"), ours.get("salt")
        sources, retain_s = ours.get("sources", ()), ours.get("retain_s", 0.0)
        if not (conversation and _is_key(conversation) and _is_key(salt)):
            return None
        if not isinstance(sources, list | tuple) or not all(map(_is_key, sources)):
            return None
        if not isinstance(retain_s, int | float) or not retain_s >= 0:  # Not a number is not, either.
            return None
        return cls(
            conversation,
            salt,
            tuple(sources),
            # An integer of a client's may be too large for a float.
            float(min(retain_s, _LONGEST_S)),
            protect=ours.get("protect") is True,
            release=ours.get("release") is True,
            return_token_ids=ours.get("return_token_ids") is True,
        )


def _is_key(value: object) -> TypeGuard[str]:
    """Whether a value may be kept as a key: text short enough that many of it can be remembered."""
    return isinstance(value, str) and len(value) <= _LONGEST_KEY


def token_ids_asked_for(request: Request) -> list[int] | None:
    """The prompt's token ids, if the router asks for them and they are all there is to the prompt."""
    leg = LegParams.of(request)
    if leg is None or not leg.return_token_ids or media_items(request) or request.prompt_token_ids is None:
        return None
    return list(request.prompt_token_ids)


def is_handle(params: Mapping[str, Any]) -> bool:
    """Whether `do_remote_prefill` says from where, as another engine writes it. VLLM's own code dies of one that does not."""
    block_ids = params.get("remote_block_ids")
    return (
        isinstance(block_ids, list | tuple)
        and bool(block_ids)
        and all(isinstance(group, list | tuple) for group in block_ids)
        and all(type(block_id) is int and block_id >= 0 for group in block_ids for block_id in group)
        and all(
            isinstance(params.get(key), str)
            for key in ("remote_engine_id", "remote_request_id", "remote_host")
        )
        and type(params.get("remote_port")) is int
    )


def provable(request: Request) -> bool:
    """Whether token ids, media hashes, salt and adapter are all that decides this request's KV."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and all(_CONTENT_HASH.fullmatch(content) for content, _, _ in media_items(request))
        and not (request.lora_request is not None and request.lora_request.load_inplace)
        and not request.resumable
        and request.pooling_params is None
    )


def media_items(request: Request) -> list[tuple[str, int, int]]:
    """Content hash, first placeholder token and number of placeholder tokens of each media item of a prompt."""
    return [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    ]


def ended_well(request: Request) -> bool:
    """Whether a request ended as it should: by a stop token, its length, or because it repeated itself."""
    return request.status in _ENDED_WELL


def may_have_met_a_stop_string(request: Request) -> bool:
    """Whether an aborted request may be a turn that ended as its client wished.

    vLLM looks for a client's `stop` strings in its API server, which then aborts the request in the engine: the engine cannot
    tell that from a client that went away. What was computed is as true either way, once there is output: before, vLLM counts
    tokens as computed whose KV has yet to arrive from prefill.
    """
    sampling = request.sampling_params
    aborted = request.status == RequestStatus.FINISHED_ABORTED and request.num_output_tokens > 0
    return aborted and sampling is not None and bool(sampling.stop)


def seed(request: Request, leg: LegParams, identity: str) -> bytes:
    """Start of the request's digest chain. An adapter's name may be pointed at another one; its path tells them apart."""
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_path) if lora else ("", "")
    return digests.seed(identity, leg.salt, request.cache_salt or "", *adapter)


def engine_identity(vllm_config: VllmConfig, block_size: int) -> str:
    """Digest of what two engines must share for a block of one to mean the same on the other."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    media = model.multimodal_config
    parts: tuple[Any, ...] = (
        model.model,
        model.revision,
        model.dtype,
        model.quantization,
        model.get_head_size(),
        model.get_total_num_kv_heads(),
        model.get_total_num_hidden_layers(),
        cache.cache_dtype,
        block_size,
        # Drafts from n-grams leave KV as it is, and help decode alone: prefill does without them.
        vllm_config.speculative_config is not None and vllm_config.speculative_config.uses_draft_kv_cache(),
        model.hf_overrides if isinstance(model.hf_overrides, dict) else None,
        (media.mm_processor_kwargs, media.media_io_kwargs) if media is not None else None,
    )
    return digests.seed(*map(str, parts)).hex()


def layout_objection(kv_cache_config: KVCacheConfig) -> str | None:
    """Why this model's KV cannot be proven block by block; None when it can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec  # noqa: PLC0415

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"it has {len(groups)} KV cache groups (sliding-window or state-space layers); only one is supported"
    spec = groups[0].kv_cache_spec
    # By name of class: vLLM derives layouts from full attention that drop or add blocks.
    if type(spec) not in {FullAttentionSpec, MLAAttentionSpec}:
        return f"its KV cache is {type(spec).__name__}, not full attention"
    if spec.non_causal:
        return "its layers look ahead: a block depends on what follows it"
    return None


def attention_objection(vllm_config: VllmConfig, *, on_cpu: bool) -> str | None:
    """Why KV that one step computed is of no use to another; None when it is.

    vLLM 0.32's CPU kernels for latent attention compute something else when they decode than when they prefill, which
    is why vLLM takes prefix caching and chunked prefill away from such engines.
    """
    if on_cpu and vllm_config.model_config.use_mla:
        return "on CPU, latent attention (MLA) decodes with other results than it prefills"
    return None


def parallel_objection(vllm_config: VllmConfig) -> str | None:
    """Why this engine's blocks cannot be addressed one by one; None when they can."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism spreads a block's tokens over ranks"
    return None


def fence_objection(vllm_config: VllmConfig) -> str | None:
    """Why a pull into this engine's freed blocks would not be safe; None when it is.

    With asynchronous scheduling a step that still runs may write to the blocks of a request that was just aborted. vLLM
    holds such blocks back, but only on engines that it knows as KV consumers (`Scheduler.defer_block_free`).
    """
    transfer = vllm_config.kv_transfer_config
    if transfer.is_kv_consumer or vllm_config.max_concurrent_batches <= 1:
        return None
    return 'with asynchronous scheduling it needs kv_role "kv_both", as `bidikv engine prefill` sets it'
