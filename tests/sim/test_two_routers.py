"""Lives with two routers: one at a time changes the fabric, and planted faults are found."""

import pytest

from tests.sim.planted_terms import TERM_PLANTS
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
    assert world.clients.answered_count >= len(world.clients.talks), "the clients were served"
    return world


@pytest.mark.slow
def test_seeds():
    worlds = [check(seed) for seed in range(SEEDS)]
    assert any(len(world.term_judge.winners) > 1 for world in worlds), "some took over"
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
    pytest.fail(f"{PLANTED_SEEDS_MAX} seeds live with it")


def test_lives_repeat_with_their_seed():
    assert run(3, two_routers).digest() == run(3, two_routers).digest()
