"""Runs inside engines: vLLM's MooncakeConnector, unchanged, on a machine without an accelerator.

Its worker asks which device it runs on before it starts Mooncake's TCP transport, and torch has no answer on CPU.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

__all__ = ["MooncakeConnector"]

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0
