"""Which versions of vLLM the connector was made for, and what to say to the others."""

from __future__ import annotations

import re
from typing import Final

SUPPORTED_VLLM: Final = ("0.32", "0.33")
"""Releases whose surface `tests/contract` was run against. Both are the same to the connector."""


def vllm_objection(version: str) -> str | None:
    """Why the connector does not run on this vLLM; None if it does."""
    release = re.match(r"(\d+\.\d+)(?=\.|$|[^\d.])", version)
    if release is not None and release.group(1) in SUPPORTED_VLLM:
        return None
    return (
        f"this is vLLM {version}; bidikv supports {' and '.join(SUPPORTED_VLLM)}: install one of them, or set "
        "kv_connector_extra_config.bidikv.allow_untested_vllm to true to try this one"
    )
