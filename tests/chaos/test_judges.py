"""Each judge of a chaos run detects its violation and accepts documented behaviour."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fabric.record.manifest import OwnerState, encode_manifest
from tests.chaos.judges import EXEMPT_S, Ack, Judges
from tests.chaos.nemesis import Nemesis
from tests.support.blocks import make_manifest

SECRET = "otter lantern quartz violin"


@pytest.fixture
def judges():
    return Judges()


def violated_judges(judges):
    return [violation.judge for violation in judges.found]


@pytest.mark.parametrize(
    ("text", "is_whole", "is_right"),
    [
        (f" {SECRET}. And more", True, True),
        (SECRET, True, True),
        ("otter lantern", False, True),
        (f"{SECRET} is it", False, True),
        ("", False, True),
        ("", True, False),
        ("otter lantern", True, False),
        ("otter otter lantern quartz violin", True, False),
        ("otter quartz", False, False),
        ("amber falcon copper meadow", True, False),
    ],
)
def test_wrong_doubled_or_lost_words_are_violations(judges, text, is_whole, is_right):
    judges.check_words("Mira", SECRET, text, is_whole=is_whole)
    assert violated_judges(judges) == ([] if is_right else ["right answers"])


def turn(judges, node, epoch, cached, at_s=10.0):
    judges.check_turn("Mira", Ack(node, epoch, 100, at_s), cached)


def test_memory_lost_without_a_fault_is_a_violation(judges):
    turn(judges, "node-a", 1, 0)
    turn(judges, "node-a", 1, 95)
    assert violated_judges(judges) == []
    turn(judges, "node-a", 1, 10)
    assert violated_judges(judges) == ["memory"]


def test_memory_acknowledged_during_a_fault_may_be_lost(judges):
    """A raylet is killed, and its node acknowledges one more turn before it ends, too."""
    nemesis = Nemesis(SimpleNamespace(names=["node-a"]), judges, 1, None)

    def kill_slowly():
        node = nemesis._node()
        turn(judges, node, 1, 0, at_s=judges.now_s())

    nemesis._kinds["kill raylet"] = kill_slowly
    nemesis.strike("kill raylet")
    turn(judges, "node-b", 2, 10, at_s=judges.now_s())
    assert violated_judges(judges) == []
    turn(judges, "node-b", 2, 10, at_s=judges.now_s())
    assert violated_judges(judges) == ["memory"]


@pytest.mark.parametrize(
    ("faulty_part", "node", "epoch", "is_excused"),
    [
        ("node-a", "node-b", 2, True),  # taken over
        ("node-a", "node-a", 1, False),  # it restarted with all acknowledged turns
        ("node-b", "node-b", 2, False),  # no takeover was needed
        ("disk node-a", "node-a", 1, True),
        ("disk node-b", "node-a", 1, False),
    ],
)
def test_memory_lost_by_a_fault_is_excused(judges, faulty_part, node, epoch, is_excused):
    turn(judges, "node-a", 1, 0, at_s=0.0)
    judges.record_fault(faulty_part)
    turn(judges, node, epoch, 0, at_s=11.0)
    assert violated_judges(judges) == ([] if is_excused else ["memory"])


def test_decreasing_epoch_is_a_violation(judges):
    turn(judges, "node-b", 3, 0)
    turn(judges, "node-a", 2, 100)
    assert violated_judges(judges) == ["epochs"]


def test_restarted_router_may_serve_from_the_earlier_owner(judges):
    turn(judges, "node-b", 3, 0, at_s=EXEMPT_S / 2)
    judges.record_fault("router")
    turn(judges, "node-a", 2, 100, at_s=EXEMPT_S / 2)
    assert violated_judges(judges) == []


def write(folder, node, record):
    path = folder / node / "model" / "manifests" / "one.mf"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_manifest(replace(record, owner=node)))


def test_two_owners_at_one_epoch_are_a_violation(judges, tmp_path):
    record = make_manifest([])
    write(tmp_path, "node-a", record)
    write(tmp_path, "node-b", replace(record, epoch=record.epoch + 1))
    write(tmp_path, "node-c", replace(record, state=OwnerState.REPLICA))
    assert judges.check_owners(tmp_path) == 3
    assert violated_judges(judges) == []
    write(tmp_path, "node-d", record)
    judges.check_owners(tmp_path)
    assert violated_judges(judges) == ["owners"]


def row(name, owner="node-a", replicas=()):
    return {"id": name, "owner": owner, "replicas": list(replicas)}


def test_listed_erased_or_doubled_agents_are_violations(judges):
    judges.check_listed([row("Mira"), row("Nora", replicas=["node-b"])], {"Otto"})
    assert violated_judges(judges) == []
    judges.check_listed([row("Otto")], {"Otto"})
    judges.check_listed([row("Mira", replicas=["node-a"])], set())
    judges.check_listed([row("Mira"), row("Mira", "node-b")], set())
    assert violated_judges(judges) == ["erased", "owners", "owners"]


def test_words_of_erased_agents_in_files_are_violations(judges, tmp_path):
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "1.full").write_bytes(b"\0\1zq001v000kx\2")
    judges.check_erased(tmp_path, {"zq001v001kx"})
    assert violated_judges(judges) == []
    judges.check_erased(tmp_path, {"zq001v000kx"})
    assert violated_judges(judges) == ["erased"]


def test_growing_processes_are_a_violation(judges):
    small = {"descriptors": 40, "threads": 20, "mebibytes": 120}
    judges.check_growth({"router": small}, {"router": small | {"mebibytes": 140}})
    assert violated_judges(judges) == []
    judges.check_growth({"router": small}, {"router": small | {"descriptors": 900}})
    assert violated_judges(judges) == ["growth"]
