"""Whole runs: every turn is answered once under all conditions, and runs repeat exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.simulate.catalog import DYNAMO_SCALES, policy_names
from router.simulate.faults import Fault, FaultKind
from router.simulate.machine import Machine
from router.simulate.request import SimulateRequest
from router.simulate.run import Conditions
from tests.router.simulate.small import THREE, fleet, node, workload_run

ROOT = Path(__file__).resolve().parents[3]
FAULTS = {
    "none": (),
    "lost and back": (Fault(FaultKind.LOSE, "fast", 60.0, 60.0),),
    "lost": (Fault(FaultKind.LOSE, "fast", 60.0),),
    "two lost": (Fault(FaultKind.LOSE, "fast", 60.0), Fault(FaultKind.LOSE, "slow", 70.0, 40.0)),
    "all lost": tuple(Fault(FaultKind.LOSE, n, 100.0, 20.0) for n in ("slow", "fast", "middle")),
    "drained": (Fault(FaultKind.DRAIN, "middle", 60.0),),
    "drained and lost": (
        Fault(FaultKind.DRAIN, "middle", 60.0),
        Fault(FaultKind.LOSE, "middle", 61.0, 30.0),
    ),
    "slowed": (Fault(FaultKind.SLOW, "fast", 10.0, 60.0, 5.0),),
}


def assert_nothing_is_left(run):
    """Check that ended turns leave no booking, no reservation and no running cache."""
    ledger, directory = run.router.fleet.ledger, run.router.fleet.directory
    for name, machine in run.machines.items():
        assert ledger.turns(name) == 0
        assert ledger.prefill_s(name) == pytest.approx(0.0, abs=1e-6)
        assert ledger.coming_bytes(name) == 0
        assert machine.engine.active_count == machine.engine.waiting_count == 0
    assert all(directory.reservation(key) is None for key in directory.all_keys())


@pytest.mark.parametrize("policy", ["seconds", "sticky", "round-robin", "dynamo-4"])
@pytest.mark.parametrize("faults", FAULTS)
def test_every_turn_is_answered_once(policy, faults):
    conditions = Conditions(faults=FAULTS[faults], wrong_speeds=(0.6, 1.6), slow_links=3.0)
    run = workload_run("W1", policy, sessions=12, load=2.0, conditions=conditions)
    outcome = run.play()
    counters = run.dispatcher.counters

    assert counters.asked == counters.answered == outcome.turns > 60
    assert len(counters.ttft_s) == outcome.turns
    assert min(counters.ttft_s) > 0
    assert outcome.retried > 0 if faults == "all lost" else "lost" in faults or not outcome.retried
    assert_nothing_is_left(run)


def test_turn_answered_twice_is_detected():
    run = workload_run("W6", sessions=3)
    saved = type(run.dispatcher)._on_end

    def twice(self, sent):
        saved(self, sent)
        saved(self, sent)

    run.dispatcher._on_end = twice.__get__(run.dispatcher)
    with pytest.raises(AssertionError, match="answered once"):
        run.play()


def test_unanswered_turn_is_detected(monkeypatch):
    """The injected fault: clients do not repeat turns whose node was lost."""
    monkeypatch.setattr("router.simulate.run.STALLED_S", 600.0)
    faults = FAULTS["all lost"]
    run = workload_run("W1", sessions=12, load=2.0, conditions=Conditions(faults=faults))
    run.dispatcher._on_lost = run.dispatcher._close

    with pytest.raises(AssertionError, match="never answered"):
        run.play()


def test_drained_node_migrates_agents_with_their_caches():
    drained = Conditions(faults=(Fault(FaultKind.DRAIN, "middle", 30.0),))
    run = workload_run("W4", sessions=20, conditions=drained)
    outcome = run.play()
    run.router.send_heartbeats()

    assert outcome.moves > 0
    assert outcome.moved_bytes > 0
    assert run.router.fleet.directory.agents_of_node("middle") == []
    undisturbed = workload_run("W4", sessions=20).play()
    assert outcome.cached_share == pytest.approx(undisturbed.cached_share, abs=0.02)


def test_slow_links_delay_a_drain():
    def relocated(slow_links):
        conditions = Conditions((Fault(FaultKind.DRAIN, "middle", 30.0),), slow_links=slow_links)
        return workload_run("W4", sessions=20, conditions=conditions).play().ttft_mean_s

    assert relocated(200.0) > relocated(1.0)


def test_returning_node_keeps_its_disk():
    run = workload_run("W4", "sticky", sessions=12)
    run.play()
    machine = max(run.machines.values(), key=lambda each: len(each.cache.agents))
    owned = run.router.fleet.directory.agents_of_node(machine.name)
    machine.die()
    machine.restart()
    run.router.send_heartbeats()

    assert len(machine.cache.agents) > 0
    assert run.router.fleet.directory.agents_of_node(machine.name) == owned


def test_silent_node_gets_no_turns_after_its_lease():
    lost = Conditions(faults=(Fault(FaultKind.LOSE, "fast", 60.0),))
    run = workload_run("W1", sessions=12, load=2.0, conditions=lost)
    run.play()
    taken = run.machines["fast"].turns_count
    whole = workload_run("W1", sessions=12, load=2.0)
    whole.play()

    assert 0 < taken < whole.machines["fast"].turns_count
    assert not run.router.fleet.is_up("fast")


def test_equal_nodes_get_equal_shares():
    twins = fleet(node("a"), node("b"))
    for policy in ("seconds", "sticky", "least-load", "round-robin"):
        run = workload_run("W2", policy, sessions=200, on=twins)
        run.play()
        first, second = (machine.turns_count for machine in run.machines.values())
        assert abs(first - second) < 40, policy


def test_policies_produce_different_results():
    """Each policy makes some decisions of its own, so no two have the same figures."""
    names = [name for name in policy_names() if not name.startswith(("router", "dynamo-tuned"))]
    figures, on = {}, THREE.with_link_mbit(10_000)
    for name in names:
        outcome = workload_run("W1", name, sessions=14, load=1.2, on=on).play()
        figures[name] = (outcome.ttft_mean_s, outcome.cached_share, outcome.relocated_share)

    assert len(set(figures.values())) == len(names) == 8 + len(DYNAMO_SCALES)
    assert figures["sticky"][2] == 0.0
    assert figures["round-robin"][2] > 0.5
    assert figures["sticky"][1] > figures["round-robin"][1]


def test_seeds_and_loads_produce_different_results():
    runs = {
        (seed, load): workload_run("W6", sessions=20, seed=seed, load=load).play().ttft_mean_s
        for seed in (1, 2)
        for load in (0.5, 0.9)
    }
    assert len(set(runs.values())) == 4


SMALL_FLEET = SimulateRequest(
    workloads=("W1", "W7"),
    policies=("seconds", "dynamo-tuned"),
    seeds=1,
    sessions=5,
    faults=("lose:ultra@30+40", "drain:pro@60"),
    wrong_speeds="0.6-1.6",
    json=True,
)
LARGE_FLEET = SimulateRequest(
    workloads=("W7",), policies=("seconds",), fleet="thirty-two", seeds=1, sessions=40, json=True
)


def simulate_json(request, hash_seed):
    """Run the simulator in a separate process; return its output."""
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "router.simulate", json.dumps(request.as_plain())]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("request_of", [SMALL_FLEET, LARGE_FLEET], ids=["small", "large"])
def test_same_seed_gives_same_bytes_in_another_process(request_of):
    one, other = simulate_json(request_of, "1"), simulate_json(request_of, "2")

    assert one == other
    assert len(json.loads(one)["cells"]) == len(request_of.workloads)


@pytest.mark.parametrize("faults", ["none", "drained and lost", "slowed"])
def test_reused_view_equals_rebuilt_view(faults, monkeypatch):
    reused, view = [], Machine.view

    def checked(self):
        before, found = self._view, view(self)
        assert found == self._build_view()
        reused.append(before is not None and before[1] is found)
        return found

    monkeypatch.setattr(Machine, "view", checked)
    workload_run("W1", sessions=12, load=2.0, conditions=Conditions(FAULTS[faults])).play()

    assert True in reused
    assert False in reused


def test_misreported_speeds_appear_in_node_views():
    run = workload_run("W6", sessions=2, conditions=Conditions(wrong_speeds=(0.6, 1.6)))
    views = {name: machine.view().prefill_tokens_per_s for name, machine in run.machines.items()}
    real = {model.name: model.prefill_tokens_per_s for model in THREE.each()}

    factors = [views[name] / real[name] for name in real]
    assert len(set(factors)) == 3
    assert all(0.6 <= factor <= 1.6 for factor in factors)
