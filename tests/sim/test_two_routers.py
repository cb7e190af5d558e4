"""Lives with two routers: one at a time changes the fabric, and planted faults are found."""

from types import SimpleNamespace as Part

import pytest

from tests.sim.planted_terms import TERM_PLANTS
from tests.sim.term_judge import TermJudge
from tests.sim.world import run, two_routers

SEEDS, SEEDS_NIGHTLY, SEEDS_A_TEST = 10, 10_000, 10
PLANTED_SEEDS_MAX = 60
TRACE_TAIL = 40
# First lives tried for the faults that few lives find.
FOUND_BY = {"restarted_nodes_forget_their_term": (38,), "terms_are_not_written": (47,)}


def check(seed):
    world = run(seed, two_routers)
    if world.violation is not None:
        tail = "\n".join(f"{at_s:10.4f}  {text}" for at_s, text in world.trace[-TRACE_TAIL:])
        message = f"seed {seed}: {world.violation}\n{tail}\n"
        pytest.fail(f"{message}see it all: python -m tests.sim --routers 2 --seed {seed} --trace")
    assert world.clients.answered_count >= len(world.clients.talks), "clients were served"
    return world


@pytest.mark.slow
def test_seeds():
    worlds = [check(seed) for seed in range(SEEDS)]
    assert any(len(world.term_judge.winners) > 1 for world in worlds), "a standby took over"
    assert all(world.term_judge.placed_count for world in worlds)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SEEDS, SEEDS_NIGHTLY, SEEDS_A_TEST))
def test_many_more_seeds(first):
    for seed in range(first, first + SEEDS_A_TEST):
        check(seed)


@pytest.mark.parametrize("plant", TERM_PLANTS, ids=lambda plant: plant.__name__)
def test_lives_find_planted_faults(plant):
    for seed in (*FOUND_BY.get(plant.__name__, ()), *range(PLANTED_SEEDS_MAX)):
        with plant():
            if run(seed, two_routers).violation is not None:
                return
    pytest.fail(f"{PLANTED_SEEDS_MAX} seeds do not find it")


@pytest.mark.parametrize(("epoch", "is_fine"), [(4, True), (5, False)])
def test_late_turn_of_an_earlier_term_is_judged_by_its_epoch(epoch, is_fine):
    """Another node has the agent at epoch 5, in the next term."""
    failed = []
    judge = TermJudge(Part(fail=failed.append))
    for node, term, its_epoch in (("node-b", 4, 5), ("node-a", 3, epoch)):
        terms = Part(_folder=Part(name=node), _ballot=Part(granted=Part(term=term)))
        judge._on_placed(terms, Part(key=("red", "alice"), manifest=Part(epoch=its_epoch)))
    assert (failed == []) is is_fine


@pytest.mark.parametrize("is_stored", [False, True])
def test_restarted_node_must_keep_the_terms_that_it_stored(is_stored):
    """On a full disk it follows a later term in memory only."""
    failed = []
    judge = TermJudge(Part(fail=failed.append))
    before, after = (Part(_folder=Part(name="node-a")) for _ in range(2))
    judge._on_accepted(before, 3, "accepts a change of")
    if is_stored:
        judge._note_lasting(before, 3)
    judge._on_accepted(after, 2, "accepts a change of")
    assert bool(failed) is is_stored


def test_lives_repeat_with_their_seed():
    assert run(3, two_routers).digest() == run(3, two_routers).digest()
