"""Weights of tenants on a node, by the order in which their turns start and are computed."""

from dataclasses import replace

import pytest

from fabric.ids import TenantId
from fabric.turn.generation import Priority
from node.engine.scheduler import Scheduler
from tests.node.fake_engine import SchedulerRig
from tests.support.services import running
from tests.support.shared_heads import request_of, together
from tests.support.tiny_models import ONE_LAYER, write_model

PROMPT = 9_000  # of several chunks


def start_order(rig, count):
    """Return the tenants of the next turns to start, in order, as running ones end."""
    order, started_ids = [], set(map(id, rig.queue.running))
    while len(order) < count:
        rig.scheduler.iterate()
        for sequence in rig.queue.running:
            if id(sequence) not in started_ids:
                started_ids.add(id(sequence))
                order.append(sequence.tenant)
    return order


def chunk_tenants(rig, count):
    """Return the tenants of the next chunks, in order."""
    began = len(rig.engine.log)
    tenants = {sequence.cache: sequence.tenant for sequence in rig.queue}
    rig.run(count)
    return [tenants[entry[1]] for entry in rig.engine.log[began:] if entry[0] == "prefill"]


@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_chunks_are_shared_by_weight(weight):
    rig = SchedulerRig()
    for number in range(2):
        rig.add(PROMPT, tenant="a", weight=weight, seed=number)
        rig.add(PROMPT, tenant="b", seed=number + 2)
    order = chunk_tenants(rig, 12)

    assert order.count("a") == weight * order.count("b")
    assert set(order[:2]) == {"a", "b"}, "neither waits for the other's whole share"


def test_slots_are_shared_by_weight():
    """A tenant with three times the weight gets three of four slots, in any order of arrival."""
    rig = SchedulerRig(active_max=4)
    for number in range(6):
        rig.add(3, answer_tokens=500, tenant="b", seed=number)
    for number in range(6):
        rig.add(3, answer_tokens=500, tenant="a", weight=3.0, seed=number + 6)
    order = start_order(rig, 4)

    assert sorted(order) == ["a", "a", "a", "b"]


def test_a_tenant_with_more_than_its_part_gives_up_slots_by_weight():
    rig = SchedulerRig(active_max=4)
    for number in range(4):
        rig.add(3, answer_tokens=500, tenant="b", seed=number)
    rig.run(2)
    for number in range(4):
        rig.add(3, answer_tokens=500, tenant="a", weight=3.0, seed=number + 6)
    rig.run(2)

    running = sorted(sequence.tenant for sequence in rig.queue.running)
    assert running == ["a", "a", "a", "b"]
    assert [sequence.tenant for sequence in rig.queue.paused] == ["b", "b", "b"]


def test_weight_counts_among_background_prompts_too():
    rig = SchedulerRig()
    for number in range(2):
        rig.add(PROMPT, tenant="a", weight=3.0, seed=number, priority=Priority.BACKGROUND)
        rig.add(PROMPT, tenant="b", seed=number + 2, priority=Priority.BACKGROUND)
    order = chunk_tenants(rig, 8)

    assert order.count("a") == 3 * order.count("b")


def test_a_request_brings_its_tenants_weight_to_the_engine(tmp_path, monkeypatch):
    weights, add = {}, Scheduler.add

    def add_and_record(scheduler, sequence):
        weights[sequence.tenant] = sequence.weight
        add(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "add", add_and_record)
    heavy = replace(request_of(0), tenant=TenantId("a"), weight=3.0)
    light = replace(request_of(1), tenant=TenantId("b"))
    with running(tmp_path, str(write_model(tmp_path / "model", ONE_LAYER))) as service:
        together(service, [heavy, light])

    assert (weights["a"], weights["b"]) == (3.0, 1.0)
