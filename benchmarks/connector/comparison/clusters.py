"""Clusters to compare: the same launcher, model and engine flags; only `--kv-transfer-config` differs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.recipe import ReuseSettings, kv_transfer_config

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS = 32
"""vLLM's CPU attention takes no smaller block."""
_HERE = Path(__file__).parent.parent


def stock(model: Path, engine_args: tuple[str, ...], say: Callable[[str], None]) -> Cluster:
    """Stock engines, bidirectional; the cluster's own router runs beside them without anything to do."""
    config = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "comparison.quiet_nixl",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": ReuseSettings().retention_ttl_s,
            "kv_recompute_threshold": ReuseSettings().recompute_threshold,
        },
    }
    # The last of two settings is the one that argparse keeps.
    extra = (*engine_args, "--kv-transfer-config", json.dumps(config))
    return Cluster(
        ClusterSpec(model, readback=False, engine_args=extra, engine_env=_environment()), progress=say
    )


def ours(model: Path, engine_args: tuple[str, ...], say: Callable[[str], None]) -> Cluster:
    """Engines with our connector, behind our router."""
    return Cluster(ClusterSpec(model, engine_args=engine_args, engine_env=_environment()), progress=say)


class TimedCluster(Cluster):
    """Our engines with a connector that also logs how long its hooks take."""

    def _plan(self) -> None:
        super()._plan()
        self._engines = {
            name: replace(engine, extra_args=(*engine.extra_args, "--kv-transfer-config", json.dumps(config)))
            for name, engine in self._engines.items()
            for config in [_timed(kv_transfer_config(engine))]
        }


def timed(model: Path, engine_args: tuple[str, ...], say: Callable[[str], None]) -> TimedCluster:
    """One such cluster, with prefill's own prefix cache off: everything that can be reused comes from decode."""
    spec = ClusterSpec(
        model, prefill_prefix_caching=False, engine_args=engine_args, engine_env=_environment()
    )
    return TimedCluster(spec, progress=say)


def _timed(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **config,
        "kv_connector": "TimedBidiNixlConnector",
        "kv_connector_module_path": "comparison.timed_connector",
    }


def _environment() -> dict[str, str]:
    """What engines need to import our modules and to empty their prefix cache on demand, and one thread for each.

    With two threads each on two cores, an engine's threads wait for one another whenever anything else runs.
    """
    paths = [str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
