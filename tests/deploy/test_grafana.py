"""The dashboard's and the alerts' queries are PromQL, and ask only for what router and engines publish."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from bidikv_server.reasons import Reason
from bidikv_server.router.metrics import RouterMetrics
from bidikv_server.router.state.metrics import StateMetrics

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "deploy" / "grafana" / "alerts.yaml").read_text(encoding="utf-8"))
OF_SCRAPES = {"job", "instance"}
OF_VLLM = {"vllm:kv_cache_usage_perc": {"engine", "model_name"}}


def panels() -> list[dict]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Every expression by where it is."""
    of_panels = {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "5m")
        for panel in panels()
        for target in panel["targets"]
    }
    of_alerts = {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}
    return of_panels | of_alerts


def published() -> dict[str, set[str]]:
    """Series by name, with their labels: the router's from its code, the engines' from their document."""
    series = dict(OF_VLLM)
    for metric in of_the_router().collect():
        labels = set(labels_of(metric.name))
        for suffix in {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(
            metric.type, [""]
        ):
            series[metric.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Engines")[2]
    for name, label in re.findall(r"^\| `(\w+)` \|(.*?)\|", page, re.MULTILINE):
        labels = set(re.findall(r"\w+", label))
        for suffix in ("", "_total", "_bucket", "_count", "_sum"):
            series[f"bidikv:{name}{suffix}"] = labels | {"le"}
    return series


def of_the_router() -> CollectorRegistry:
    """All that a router publishes, its shared state's included."""
    registry = RouterMetrics().registry
    StateMetrics(registry)
    return registry


def labels_of(name: str) -> tuple[str, ...]:
    known = of_the_router()._names_to_collectors
    (collector,) = {known[n] for n in (name, f"{name}_total", f"{name}_bucket") if n in known}
    return collector._labelnames


def selectors(node) -> list[tuple[promql_parser.VectorSelector, set[str]]]:
    """Every selector in a query, with the labels that the query groups it by."""
    match node:
        case promql_parser.VectorSelector():
            return [(node, set())]
        case promql_parser.MatrixSelector():
            return [(node.vector_selector, set())]
        case promql_parser.AggregateExpr():
            grouped = set(node.modifier.labels) if node.modifier is not None else set()
            return [(selector, labels | grouped) for selector, labels in selectors(node.expr)]
        case promql_parser.NumberLiteral():
            return []
    parts = {promql_parser.BinaryExpr: ("lhs", "rhs"), promql_parser.ParenExpr: ("expr",)}.get(type(node))
    inner = [getattr(node, part) for part in parts] if parts else node.args
    return [found for part in inner for found in selectors(part)]


@pytest.mark.parametrize(("place", "query"), queries().items(), ids=lambda value: value[:40])
def test_queries_ask_for_what_is_published(place, query):
    """Names and labels exist, and reasons that are matched are reasons."""
    series = published()
    found = selectors(promql_parser.parse(query))
    assert found
    for selector, grouped in found:
        assert selector.name in series
        known = series[selector.name] | OF_SCRAPES
        matched = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert set(matched) | grouped <= known, place
        if selector.name == "bidikv_router_turns_total" and "reason" in matched:
            assert set(matched["reason"].split("|")) <= set(Reason)


def test_panels_are_laid_out():
    """Ids are unique, panels do not overlap, each says what it shows, and legends name labels of their query."""
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    for panel in panels():
        assert panel["description"]
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in target["expr"] or label in {"role", "engine", "instance"}


def test_alerts_say_what_to_do():
    """Each has a severity, a duration, a summary and a description; names are unique."""
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description"}
