"""The connector's part of `kv_connector_extra_config`, parsed once into a frozen model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError


class ConnectorConfigError(ValueError):
    """`kv_connector_extra_config` cannot be used; the message names the key."""


class ConnectorConfig(BaseModel):
    """Settings under the key `bidikv` of `kv_connector_extra_config`, plus the two of vLLM's own that we follow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["prefill", "decode"]
    """`decode` retains and serves an index; `prefill` looks up and reads back."""
    readback: bool = True
    """Off: one-directional, as without this connector (prefill never asks, decode never retains)."""
    index_host: str = "127.0.0.1"
    """Where decode's retention index listens. Loopback unless the engines are on different hosts."""
    index_port: int = Field(default=6800, ge=1, le=65535)
    """TCP port of data-parallel rank 0; each further rank takes the next port."""
    index_advertise: str | None = None
    """Host that prefill engines should use, when it is not `index_host`."""
    protected_share: float = Field(default=0.25, ge=0, le=0.9)
    """Largest share of decode's KV blocks held for conversations that said when they come back. They are given up
    before a running request would miss them, so the share only bounds what they take from the prefix cache and from
    softly retained turns."""
    lookup_timeout_s: float = Field(default=0.5, gt=0)
    """Prefill computes from scratch when decode's index has not answered by then."""
    read_timeout_s: float = Field(default=20.0, gt=0)
    """Prefill gives a read up, and recomputes, when it has not finished by then."""
    quiet_progress: bool | None = None
    """Replace NIXL's spinning progress thread by a polling one. None: only on CPU engines."""
    learn_threshold: bool = False
    """Learn for each pair of engines from how many tokens on a pull is faster than computing, and go by
    `kv_recompute_threshold` only until that is known."""
    allow_untested_vllm: bool = False
    """Start on a version of vLLM that this connector was not made for."""
    secret: SecretStr = SecretStr("")
    """What engines of one deployment share; from the environment, never from the configuration that vLLM logs."""
    decoder_kv_blocks_ttl: float = Field(default=480.0, gt=0)
    """Longest time, in seconds, that decode keeps a turn's blocks (vLLM's key)."""
    kv_recompute_threshold: int = Field(default=64, ge=0)
    """Smallest number of tokens worth a transfer (vLLM's key; its own connector reads it as a number, too)."""

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any], *, secret: str = "") -> ConnectorConfig:
        """Read the model from `kv_connector_extra_config`.

        Raises:
            ConnectorConfigError: A key is missing, unknown or out of range.
        """
        ours = extra_config.get("bidikv")
        if not isinstance(ours, Mapping):
            raise ConnectorConfigError(
                'kv_connector_extra_config has no "bidikv" object: start engines with `bidikv engine`, '
                'or add {"bidikv": {"role": "prefill" | "decode"}}'
            )
        if "secret" in ours:
            raise ConnectorConfigError(
                "kv_connector_extra_config.bidikv.secret: vLLM logs this; set BIDIKV_SECRET in the environment"
            )
        followed = {
            key: extra_config[key]
            for key in ("decoder_kv_blocks_ttl", "kv_recompute_threshold")
            if key in extra_config
        }
        try:
            return cls(**{**ours, **followed, "secret": secret})
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            place = "" if key in followed else "bidikv."
            raise ConnectorConfigError(f"kv_connector_extra_config.{place}{key}: {first['msg']}") from error

    def index_address(self, data_parallel_index: int) -> str:
        """`host:port` that prefill engines should ask for this rank (IPv6 hosts in brackets)."""
        return self._address(self.index_advertise or self.index_host, data_parallel_index)

    def listen_address(self, data_parallel_index: int) -> str:
        """`host:port` that this rank's index binds to."""
        return self._address(self.index_host, data_parallel_index)

    def _address(self, host: str, data_parallel_index: int) -> str:
        port = self.index_port + data_parallel_index
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
