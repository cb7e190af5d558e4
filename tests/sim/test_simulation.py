"""Random lives of a whole fabric, and planted faults that some of them must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.planted import PLANTS
from tests.sim.world import run

ROOT = Path(__file__).resolve().parents[2]
SEEDS, SEEDS_NIGHTLY, SEEDS_A_TEST = 10, 10_000, 10
PLANTED_SEEDS_MAX = 60
# Left to the nightly tests: found only by lives in which several events coincide (minutes), or
# later than a plant of the same kind that `make test` tries.
FOUND_LATE = {
    "source_serves_after_the_seal",
    "the_router_fences_no_turn",
    "released_owners_keep_serving",
    "epochs_are_issued_twice",
    "refused_writes_are_not_retried",
    "lower_epoch_wins",
    "late_copies_stay",
    "steps_of_ownership_are_not_written",
    "stale_owners_are_not_released",
    "target_commits_without_the_tail",
    "rows_are_borrowed_without_request",
    "moves_leave_directives_behind",
    "waiting_turns_keep_old_directives",
    "turns_do_not_wait_for_their_owner",
    "owners_are_abandoned_early",
    "a_takeover_keeps_the_epoch",
    "files_omit_their_source",
    "files_omit_lenders",
    "forks_omit_their_source",
    "forks_omit_lenders",
    "replicas_omit_lenders",
    "private_lenders_leave_loans",
    "results_are_saved_unchecked",
    "windows_are_read_one_off",
    "windows_slide_past_what_lies_ahead",
    "erasures_leave_the_quarantine",
    "the_older_directive_wins",
    "active_agents_are_evicted",
}
# Short lives that find many plants. `python -m tests.sim --plant NAME --count 60` lists them.
TRIED_FIRST = (4, 5, 3, 44, 27, 11)
# Seeds that find a plant sooner than those do; tried before all others.
FOUND_BY = {
    "erasures_do_not_reach_borrowers": (4,),
    "borrowers_name_themselves_as_lenders": (4,),
    "forks_omit_lenders": (2,),
    "forks_omit_their_source": (50,),
    "files_omit_their_source": (7,),
    "moves_omit_lenders": (22,),
    "replicas_omit_lenders": (25,),
    "erasures_leave_the_quarantine": (57,),
    "windows_stay_on_disk": (0,),
    "states_stay_on_disk": (0,),
    "receipts_count_no_derived_memory": (19,),
    "the_stored_roster_is_not_read": (205, 220),
    "turns_do_not_wait_for_their_owner": (74, 78, 251, 309),
    "private_memory_is_lent": (40, 24),
    "private_moves_are_lent": (22, 24),
    "forks_forget_directives": (7, 17),
    "undone_directives_still_apply": (7,),
    "the_older_directive_wins": (12,),
    "closed_agents_stay_hot": (17,),
    "missing_nodes_are_not_expected": (117,),
    "refused_records_are_not_put_back": (27,),
    "blocks_of_refused_saves_stay_pinned": (1, 3),
    "active_agents_are_evicted": (3,),
    "memory_is_granted_without_limit": (3,),
    "prefetches_reserve_nothing": (3,),
}
TRACE_TAIL = 40


def check(seed):
    """Run one seed; fail with its violation, and the command that reproduces it."""
    world = run(seed)
    if world.violation is not None:
        tail = "\n".join(f"{at_s:10.4f}  {text}" for at_s, text in world.trace[-TRACE_TAIL:])
        message = f"seed {seed}: {world.violation}\n{tail}\n"
        pytest.fail(f"{message}see it all: python -m tests.sim --seed {seed} --trace")
    assert world.clients.answered_count >= len(world.clients.talks), "clients were served"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_seeds(first):
    for seed in range(first, first + SEEDS_A_TEST):
        check(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SEEDS, SEEDS_NIGHTLY, SEEDS_A_TEST))
def test_many_more_seeds(first):
    for seed in range(first, first + SEEDS_A_TEST):
        check(seed)


def planted():
    for plant in (plant for plants in PLANTS.values() for plant in plants):
        marks = [pytest.mark.nightly] if plant.__name__ in FOUND_LATE else []
        yield pytest.param(plant, id=plant.__name__, marks=marks)


def test_planted_functions_accept_the_arguments_of_the_real_ones():
    for plants in PLANTS.values():
        for plant in plants:
            with plant():
                pass


@pytest.mark.parametrize("plant", list(planted()))
def test_simulation_finds_planted_faults(plant):
    tried_first = FOUND_BY.get(plant.__name__, TRIED_FIRST)
    for seed in (*tried_first, *range(PLANTED_SEEDS_MAX)):
        with plant():
            if run(seed).violation is not None:
                return
    pytest.fail(f"{PLANTED_SEEDS_MAX} seeds do not find it")


def test_runs_are_deterministic_per_seed():
    """Even in another process with another hash seed."""
    seeds = range(39, 41)  # the second copies agents after a node's return
    digests = [run(seed).digest() for seed in seeds]
    command = [sys.executable, "-m", "tests.sim", "--seed", "39", "--count", "2", "--digest"]
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "4"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert len(set(digests)) == len(seeds)
    for seed, digest in zip(seeds, digests, strict=True):
        assert f"{seed} {digest}" in process.stdout
