"""The judge of a run lets damage pass that was done behind a node's back, and nothing else."""

import random
from types import SimpleNamespace

import pytest

from fabric.block_chain import block_spans
from node.block_files import file_name
from node.block_store import BlockStore
from tests.sim.disk import Platter, SimDisk
from tests.sim.invariants import Invariants
from tests.sim.loop import Process
from tests.sim.model import FINGERPRINT, SPEC, SimCache

TOKENS = list(range(40))


def one_block():
    """Store a block that no record needs, on a node of its own; return world, platter and file."""
    dice = random.Random(0)
    platter = Platter(dice)
    blocks = BlockStore(SimDisk(platter, Process("node-a#1", dice), None), SPEC, FINGERPRINT)
    cache = SimCache(len(TOKENS))
    for token in TOKENS:
        cache.append(token)
    (span,) = block_spans(b"salt", FINGERPRINT, TOKENS)
    ref = blocks.put(span.parent, span.block_hash, TOKENS, [cache.gather(0, len(TOKENS))])
    node = SimpleNamespace(name="node-a", table=(), store=SimpleNamespace(blocks=blocks))
    hosts = {"node-a": SimpleNamespace(node=node, platter=platter)}
    found = []
    world = SimpleNamespace(nodes=hosts, fail=found.append, found=found)
    return world, platter, file_name(ref)


@pytest.mark.parametrize("seed", range(8))  # cuts the file, or flips a bit of it
def test_a_block_hurt_before_anybody_read_it_is_no_violation(seed):
    world, platter, _ = one_block()
    platter.random = random.Random(seed)
    platter.damage()
    Invariants(world)._check_records()
    assert world.found == []


def hurt_by_the_node(platter, name):
    raw = platter.files[name]
    platter.files[name] = raw[:-1] + bytes([raw[-1] ^ 1])


def cut_by_the_node(platter, name):
    platter.files[name] = platter.files[name][:-1]


def lost_by_the_node(platter, name):
    del platter.files[name]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (hurt_by_the_node, "nobody hurt it"),
        (cut_by_the_node, "indexed but not stored"),
        (lost_by_the_node, "indexed but not stored"),
    ],
)
def test_what_a_node_does_to_its_own_blocks_is_a_violation(fault, said):
    world, platter, name = one_block()
    fault(platter, name)
    Invariants(world)._check_records()
    assert len(world.found) == 1
    assert said in world.found[0]
