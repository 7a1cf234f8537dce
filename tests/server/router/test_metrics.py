"""The router's metrics: documented, bounded and told as they are."""

import re
from pathlib import Path

from bidikv.headers import ReuseHeader
from bidikv_server.reasons import Reason
from bidikv_server.router.metrics import RouterMetrics
from bidikv_server.router.state.metrics import StateMetrics

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_document_lists_every_metric():
    """With its labels, as the table has it, and nothing else."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("## Router")[2].partition("## Engines")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|", table, re.MULTILINE)
    documented = {f"bidikv_router_{name}": tuple(re.findall(r"\w+", labels)) for name, labels in rows}
    registry = RouterMetrics().registry
    StateMetrics(registry)
    assert documented == {
        collector._name + ("_info" if collector._type == "info" else ""): collector._labelnames
        or (("version",) if collector._type == "info" else ())
        for collector in registry._collector_to_names
    }


def test_ttft_buckets():
    """From 5 ms to two minutes."""
    metrics = RouterMetrics()
    metrics.ttft_seconds.labels(Reason.HIT).observe(0.004)
    edges = re.findall(
        r'bidikv_router_ttft_seconds_bucket\{le="([^"]+)",reason="hit"\} (\S+)', metrics.render().decode()
    )
    assert (edges[0], edges[-2][0], edges[-1]) == (("0.005", "1.0"), "120.0", ("+Inf", "1.0"))


def test_totals():
    """What is counted, as plain numbers by label."""
    metrics = RouterMetrics()
    assert metrics.totals() == {"turns": {}, "failed_turns": {}, "prompt_tokens": {}}
    metrics.turn_answered(ReuseHeader(Reason.HIT, 100, 64, 16, 20))
    metrics.turn_answered(ReuseHeader(Reason.HIT, None, 64, None, None))
    metrics.failed_turns.labels("mid_stream").inc()
    assert metrics.totals() == {
        "turns": {"hit": 2}, "failed_turns": {"mid_stream": 1},
        "prompt_tokens": {"remote": 128, "local": 16, "computed": 20},
    }  # fmt: skip
