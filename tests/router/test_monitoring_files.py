"""The dashboard, the alert rules and the scrape example, checked against `/metrics`."""

import json
import re
from functools import cache
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fabric.control.usage_view import ExitView, UsageView
from fabric.errors import OverloadedError
from fabric.net.links import Address, LinkKind, LinkView
from router.placement.decision import Terms
from tests.router.fake_node import FakeNode
from tests.router.rig import rig
from tests.support.moves import begin_turn, migrate

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "monitoring"
HTTP_API = (ROOT / "docs" / "http-api.md").read_text()
OF_PROMETHEUS = {"instance", "job"}  # labels that Prometheus adds to each series
VARIABLES = {"$__rate_interval": "5m", "$node": ".*"}
LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
IN_TEXT = re.compile(r"\$labels\.(\w+)")


def panels():
    """List the dashboard's panels, without its rows."""
    board = json.loads((FOLDER / "grafana.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def rules():
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions():
    """Yield all expressions with the labels that their texts show."""
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield panel["title"], text, set(LEGEND.findall(target["legendFormat"]))
    for rule in rules():
        shown = IN_TEXT.findall(" ".join(rule["annotations"].values()))
        yield rule["alert"], rule["expr"], set(shown)


EXPRESSIONS = list(expressions())


def parts_of(text):
    """Parse an expression; list its metrics with their matchers, and the labels it groups by."""
    metrics, grouped = [], set()

    def visit(part):
        if isinstance(part, promql.VectorSelector):
            matchers = [(m.name, m.value) for m in part.matchers.matchers]
            metrics.append((part.name, matchers))
        elif isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            grouped.update(part.modifier.labels)
        elif isinstance(part, promql.BinaryExpr) and part.modifier is not None:
            matching = re.search(r"\((.*)\)", str(part.modifier.matching or ""))
            grouped.update(filter(None, re.split(r",\s*", matching[1])) if matching else ())

    assert promql.walk(promql.parse(text), visit)
    return metrics, grouped


@cache
def labels_known(metrics_text):
    """Return the labels and values of each sample's name."""
    known = {}
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            values = known.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    return known


async def metrics_of_busy_router():
    """Return `/metrics` of a router in which each kind of sample has occurred."""
    busy = FakeNode("node-b")
    lan = Address("127.0.0.1", 7, LinkKind.ETHERNET)
    link = LinkView(
        "node-a", lan.host, lan.port, lan.kind, reachable=True, rtt_s=0.001, bytes_per_s=1e8
    )
    sizes = {name: 1 for name in UsageView.__dataclass_fields__ if name.endswith("_bytes")}
    busy.view_changes = {
        "usage": UsageView(**sizes),
        "certificate_ends_s": 1.8e9,
        "last_exit": ExitView(1.7e9, "killed", "ended without a trace"),
        "links": (link,),
        "restore_bytes_per_s": 2e9,
        "dropped_caches": 3,
        "failed_saves": 1,
        "preempted_turns": 2,
    }
    async with rig(nodes=[FakeNode("node-a"), busy]) as fabric:
        source, target = await begin_turn(fabric)
        await migrate(fabric, target.name)
        await fabric.http().post("/v1/agents/alice/fork", json={"as": "bob", "to": source.name})
        await fabric.chat("hello", agent="alice")
        await fabric.chat("hello", model="nothing")
        telemetry = fabric.services.telemetry
        telemetry.note_estimate(Terms(prefill_s=1.0), 0.1, 1.0)
        telemetry.guesses.labels("right").inc()
        telemetry.resolved.labels("decided").inc()
        telemetry.note_refusal("default", OverloadedError("full", retry_after_s=1.0))
        telemetry.note_refusal("default", OverloadedError("full", retry_after_s=1.0))
        with telemetry.waiting("default"):
            return (await fabric.http().get("/metrics")).text


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def metrics_text(anyio_backend):
    return await metrics_of_busy_router()


@pytest.mark.parametrize(("where", "text", "shown"), EXPRESSIONS)
async def test_expression_parses_and_names_only_exported_metrics(metrics_text, where, text, shown):
    known = labels_known(metrics_text)
    metrics, grouped = parts_of(text)
    labels = set(OF_PROMETHEUS)
    for name, matchers in metrics:
        if name == "up":  # Prometheus' own
            continue
        assert name in known, f"{where}: the router exports no {name}"
        labels |= known[name].keys()
        for label, _ in matchers:
            assert label in known[name], f"{where}: {name} has no label {label}"
    assert grouped | shown <= labels, f"{where}: no metric in it has {grouped | shown - labels}"


#: Labels whose values are constants of the code.
CHOSEN = {
    "macfabric_drive_bytes": "kind",
    "macfabric_disk_bytes": "kind",
    "macfabric_hot_bytes": "kind",
    "macfabric_memory_bytes": "kind",
    "macfabric_router_voters": "kind",
    "macfabric_turn_part_seconds_bucket": "part",
}


@pytest.mark.parametrize(("where", "text", "shown"), EXPRESSIONS)
async def test_expression_selects_values_that_occur(metrics_text, where, text, shown):
    known = labels_known(metrics_text)
    for name, matchers in parts_of(text)[0]:
        label = CHOSEN.get(name)
        expected = {v for each, value in matchers if each == label for v in value.split("|")}
        assert label is None or expected <= known[name][label], (where, name, expected)


def test_states_that_rules_select_are_states_of_nodes():
    named = {"expired", "failed", "asleep", "suspect"}
    for rule in rules():
        for name, matchers in parts_of(rule["expr"])[0]:
            if name == "macfabric_node_state":
                assert {v for _, value in matchers for v in value.split("|")} <= named


def test_alert_rules_cover_paging_conditions():
    needed = {
        "RouterDown", "NodeDown", "NodeSuspect", "DiskNearlyFull", "MemoryPressure",
        "SlowFirstToken", "ErrorRate", "TenantRefused", "DamagedBlocks", "CertificateExpiry",
        "NoStandby", "NoQuorum", "NoActiveRouter",
    }  # fmt: skip
    names = [rule["alert"] for rule in rules()]

    assert {f"Macfabric{name}" for name in needed} <= set(names)
    assert len(names) == len(set(names))
    assert all(set(rule["annotations"]) == {"summary", "action"} for rule in rules())
    assert all(rule["labels"]["severity"] in {"warning", "critical"} for rule in rules())


@pytest.mark.parametrize(
    "wrong", ["macfabric_no_such_total", 'macfabric_node_up{nod="a"}', "sum by (a) (up", "rate(up)"]
)
def test_wrong_expressions_are_found(wrong):
    known = {"macfabric_node_up": {"node": {"a"}}, "up": {}}
    try:
        metrics, _ = parts_of(wrong)
    except ValueError:
        return
    assert any(
        name not in known or any(label not in known[name] for label, _ in matchers)
        for name, matchers in metrics
    )


def test_panels_do_not_overlap():
    places = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & places, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_scrape_example_uses_the_key_for_watching():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]

    assert config["rule_files"] == ["alerts.yml"]
    assert job["job_name"] == "macfabric"  # which rules name
    assert job["authorization"]["credentials_file"] == "DATA/watch.key"


async def test_every_metric_is_described(metrics_text):
    table = HTTP_API.partition("## Metrics")[2]
    named = set(re.findall(r"`([a-z_]+)`", table)) | {"migrations", "migration_seconds"}
    families = {family.name for family in text_string_to_metric_families(metrics_text)}
    short = {name.removeprefix("macfabric_") for name in families}
    missing = {
        name
        for name in short
        if not {name, f"{name}_total"} & named and not name.startswith("migration_")
    }

    assert missing == set()
