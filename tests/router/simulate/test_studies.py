"""Fleets, workloads, statistics and reports of the simulator."""

import importlib.util
import io
import json
import math
import re
from xml.etree import ElementTree as ET

import pytest
import yaml
from matplotlib.image import imread

from fabric.errors import RejectedError
from router.simulate import report
from router.simulate.__main__ import main
from router.simulate.catalog import DYNAMO_SCALES, WORKLOADS, find_policy, find_workload
from router.simulate.chart import draw
from router.simulate.faults import FaultKind, parse_factors, parse_fault, require_nodes
from router.simulate.fleet_file import parse_fleet, read_fleet, shipped_names
from router.simulate.request import SimulateRequest
from router.simulate.run import Conditions
from router.simulate.shared_beginnings import HitRate
from router.simulate.statistics import interval, ratio
from router.simulate.study import Study, overall, plan_workload
from router.simulate.workload import Scale, capacity_per_s, work_of
from tests.router.simulate.small import THREE, fleet, node, workload_run

SCALE = Scale(4, 1_000_000)


@pytest.fixture(scope="module")
def studied():
    """Study one small workload; return the study and its cells."""
    study = Study(THREE, ("sticky", "seconds", "dynamo-tuned"), (1, 2), Conditions())
    return study, [study.cell(plan_workload(WORKLOADS["W6"], THREE, 0.75, 10))]


# --- fleets -----------------------------------------------------------------------------------


def test_shipped_fleets_have_documented_sizes():
    counts = {name: read_fleet(name).count for name in shipped_names()}

    assert counts == {
        "four-unequal": 4,
        "laptops-and-studio": 3,
        "thirty-two": 32,
        "thousand": 1_000,
    }
    for name, count in counts.items():
        names = [each.name for each in read_fleet(name).each()]
        assert len(set(names)) == len(names) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []", "must be 1-"),
        ("nodes: [{name: a}, {name: a}]", "occurs twice"),
        ("nodes: [{name: a, prefill: 3}]", "unknown"),
        ("nodes: [{name: a, prefill_tokens_per_s: 0}]", "must be positive"),
        ("nodes: [{name: a, count: 5000}]", "must be 1-"),
        ("heartbeat_s: 9\nnodes: [{name: a}]", "below 3 seconds"),
        ("7", "must be a map"),
    ],
)
def test_invalid_fleet_is_rejected(text, message):
    with pytest.raises(RejectedError, match=re.escape(message)):
        parse_fleet(yaml.safe_load(text))


@pytest.mark.parametrize("text", ["a: [", "nodes: \x00"])
def test_invalid_yaml_is_rejected(tmp_path, text):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(RejectedError, match="is not YAML"):
        read_fleet(str(tmp_path / "f.yaml"))


def test_unknown_fleet_is_rejected():
    with pytest.raises(RejectedError, match="four-unequal"):
        read_fleet("five")


# --- workloads --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_sessions(name):
    workload = WORKLOADS[name]

    def asks(seed):
        return [[list(s) for s in workload.scripts_of(seed, n, SCALE)] for n in range(3)]

    assert asks(1) == asks(1)
    assert asks(1) != asks(2) or name == "W5"
    assert all(a.answer_tokens > 0 for scripts in asks(1) for script in scripts for a in script)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_ends(name):
    outcome = workload_run(name, sessions=6).play()

    assert outcome.turns >= 6
    assert 0 < outcome.ttft_mean_s < 60


def test_solved_hit_rate_is_reached():
    """W9: on a fleet that evicts nothing, the cached share is the one solved for.

    The common beginning of the first session is computed once, and others' caches are found by
    whole blocks.
    """
    outcome = workload_run("W9", sessions=60, load=0.3, on=fleet(node())).play()

    assert outcome.cached_share == pytest.approx(HitRate().cached_share, abs=0.02)


def test_impossible_hit_rate_is_rejected():
    with pytest.raises(RejectedError, match="fewer turns"):
        _ = HitRate(prompt_tokens=1_000, cached_share=0.5, turns=10).system_tokens


@pytest.mark.parametrize("load", [0.25, 0.5])
def test_load_is_a_share_of_node_capacity(load):
    """A fleet of one node is busy for about the requested share of time."""
    outcome = workload_run("W9", "sticky", sessions=150, load=load, on=fleet(node())).play()

    assert load * 0.8 < outcome.busy_share < load * 1.6


def test_capacity_grows_with_nodes():
    work = work_of(WORKLOADS["W1"], SCALE, 10)
    one, two = (capacity_per_s(fleet(node(count=count)), work) for count in (1, 2))

    assert two == pytest.approx(2 * one)


# --- faults and names -------------------------------------------------------------------------


def test_faults_and_factors_are_parsed():
    slow = parse_fault("slow:pro-1@60+30x2.5")
    lost = parse_fault("lose:ultra@9.5")

    assert (slow.kind, slow.node, slow.at_s, slow.lasts_s, slow.factor) == (
        FaultKind.SLOW,
        "pro-1",
        60.0,
        30.0,
        2.5,
    )
    assert (lost.kind, lost.at_s, lost.lasts_s) == (FaultKind.LOSE, 9.5, None)
    assert parse_factors("0.6-1.6") == (0.6, 1.6)


@pytest.mark.parametrize(
    "text", ["", "lose", "lose:a", "lose:a@x", "lose:a@1x2", "slow:a@1", "slow:a@1x0", "burn:a@1"]
)
def test_invalid_fault_is_rejected(text):
    with pytest.raises(RejectedError, match="is not a fault"):
        parse_fault(text)


@pytest.mark.parametrize("text", ["", "1", "2-1", "0-1", "a-b"])
def test_invalid_factors_are_rejected(text):
    with pytest.raises(RejectedError, match="range of factors"):
        parse_factors(text)


def test_unknown_names_are_rejected_with_suggestions():
    with pytest.raises(RejectedError, match="did you mean 'sticky'"):
        find_policy("stiky")
    with pytest.raises(RejectedError, match="known: W1"):
        find_workload("X")
    with pytest.raises(RejectedError, match="no node 'b'"):
        require_nodes([parse_fault("lose:b@1")], ["a"])


# --- figures ----------------------------------------------------------------------------------


def test_interval_matches_known_values():
    """Mean 3, standard deviation 1.581, n 5: 2.776 · 1.581 / √5 = 1.963."""
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])

    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 1.037, 4.963), abs=1e-3)
    assert interval([7.0]).low == interval([7.0]).high == 7.0


def test_ratios_are_paired_by_seed():
    """Seeds differ tenfold, but one policy takes twice as long on each: no uncertainty is left."""
    found = ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])

    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_study_compares_with_shipped_policy(studied):
    study, cells = studied
    (cell,) = cells
    plain = study.as_json(cells)["cells"][0]

    assert [each.policy for each in cell.compared] == ["seconds", "sticky", "dynamo-tuned"]
    assert plain["reference"] == "seconds"
    assert plain["policies"]["seconds"]["mean_ratio"] == [1.0, 1.0, 1.0]
    assert [run["seed"] for run in plain["policies"]["sticky"]["runs"]] == [1, 2]
    assert re.fullmatch(r"dynamo-\d+ is the best scale here", cell.compared[2].note)
    assert overall(cells)["seconds"] == (1.0, 1.0)


def test_tuning_chooses_best_scale(studied):
    _, (cell,) = studied
    tuned = cell.compared[2]
    for scale in DYNAMO_SCALES:
        study = Study(THREE, (f"dynamo-{scale}",), (1, 2), Conditions())
        (only,) = study.cell(plan_workload(WORKLOADS["W6"], THREE, 0.75, 10)).compared
        means = [math.prod(o.ttft_mean_s for o in each.outcomes) for each in (tuned, only)]
        assert means[0] <= means[1] + 1e-12


# --- reports ----------------------------------------------------------------------------------


def test_html_report_is_self_contained(studied):
    study, cells = studied
    page = report.html(study, cells, "macfabric simulate W6 --fleet <b>")

    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # of languages
    links = set(re.findall(r"https?://[^\"' <]+", page)) - names
    assert links == set()
    assert not re.search(r"<(script|link|img|iframe)\b|url\([^#]|@import", page)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    shapes = ET.fromstring(svg)
    assert len(shapes.findall(".//{http://www.w3.org/2000/svg}path")) >= 3
    assert page == report.html(study, cells, "macfabric simulate W6 --fleet <b>")
    for name in ("seconds", "sticky", "dynamo-tuned", "W6"):
        assert name in page


def test_png_chart_has_a_bar_of_each_policy(studied):
    _, cells = studied
    raw = draw(cells, "png")
    pixels = (imread(io.BytesIO(raw))[..., :3] * 255).round().astype(int)
    colours = {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}

    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= colours
    assert raw == draw(cells, "png")


def test_charts_are_refused_before_the_study_where_nothing_draws(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    request = SimulateRequest(png=str(tmp_path / "chart.png"))
    monkeypatch.setattr("sys.argv", ["simulate", json.dumps(request.as_plain())])

    assert main() == 1
    assert "macfabric[bench]" in capsys.readouterr().err


def test_simulate_request_round_trips_and_prints_its_command():
    request = SimulateRequest(
        workloads=("W1", "W2"),
        loads=(0.5,),
        policies=("sticky",),
        link_mbit=10_000.0,
        seeds=5,
        size=0.25,
    )

    assert SimulateRequest.of(request.as_plain()) == request
    assert request.command() == (
        "macfabric simulate W1 W2 --seeds 5 --size 0.25 --link-mbit 10000 --policy sticky "
        "--load 0.5"
    )
