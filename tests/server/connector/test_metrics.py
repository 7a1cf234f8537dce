"""Every metric of the connector is documented, and nothing else is."""

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the connector's metrics join vLLM's", exc_type=ImportError)
from bidikv_server import wire
from bidikv_server.connector.metrics import COUNTERS, GAUGES, HISTOGRAMS

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_document_lists_every_metric():
    """With its label, as the tables have it."""
    engines = DOCUMENT.read_text().partition("## Engines")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*?)\|", engines, flags=re.MULTILINE))
    labels = {name: label for name, (label, _) in {**COUNTERS, **GAUGES}.items()} | dict.fromkeys(
        HISTOGRAMS, ""
    )
    labels[wire.INDEX_INFO_METRIC.removeprefix("bidikv:")] = "engine_id`, `address"
    assert {name: label.strip().strip("`") for name, label in rows.items()} == labels
