"""`bidikv up`: a whole deployment on this machine, until Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bidikv_server.cli import reuse_options
from bidikv_server.cli.console import launch_errors, require_extra, say, stop_signals
from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.model import prepare_smollm2

_WATCH_S = 0.5


def up(
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            help="Hugging Face checkpoint folder. Default: SmolLM2-135M, prepared on first use.",
        ),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Number of prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode engines.")] = 1,
    port: Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="The router's port.")] = 8000,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="No readback and nothing retained, as stock vLLM: for comparisons."),
    ] = False,
    prefill_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefill-prefix-caching/--no-prefill-prefix-caching",
            help="Prefill's own prefix cache. Without it, what is reused comes from decode alone: for comparisons. "
            "Default: vLLM's.",
        ),
    ] = None,
    retention_ttl: reuse_options.TtlOption = reuse_options.DEFAULT_TTL_S,
    recompute_threshold: reuse_options.ThresholdOption = reuse_options.DEFAULT_THRESHOLD,
    protected_share: reuse_options.ShareOption = reuse_options.DEFAULT_SHARE,
    log_dir: Annotated[Path, typer.Option(help="Where each process writes its log.")] = Path("bidikv-logs"),
) -> None:
    """Start prefill engines, decode engines and a router, and serve until Ctrl-C."""
    with launch_errors(), stop_signals():
        require_extra(
            "router",
            "dns",
            "httptools",
            "msgspec",
            "prometheus_client",
            "pydantic_settings",
            "uvicorn",
            "uvloop",
        )
        folder = model or prepare_smollm2(progress=say)
        spec = ClusterSpec(
            folder,
            prefill=prefill,
            decode=decode,
            port=port,
            readback=not stock,
            prefill_prefix_caching=prefill_prefix_caching,
            reuse=reuse_options.settings(
                ttl_s=retention_ttl, threshold=recompute_threshold, share=protected_share
            ),
            log_dir=log_dir.absolute(),
        )
        say(f"starting {prefill} prefill and {decode} decode; logs in {spec.log_dir}")
        with Cluster(spec, progress=say) as cluster:
            say(f"serving {cluster.model_name} at {cluster.base_url} (Ctrl-C ends it)")
            while True:
                cluster.raise_if_dead()
                time.sleep(_WATCH_S)
