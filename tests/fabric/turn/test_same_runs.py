"""Runs shared by a prompt and a record, found from a hint that may be wrong."""

import random

from fabric.limits import EDIT_SINK_TOKENS, SPANS_MAX
from fabric.turn.chunks import as_tokens
from fabric.turn.same_runs import ChunkPlaces, SameRun, same_runs


def random_ids(seed, count):
    return random.Random(seed).choices(range(100, 50_000), k=count)


SHARED = random_ids(0, 200)
PROMPT = [*random_ids(1, 50), *SHARED, *random_ids(2, 60)]
RECORD = [*random_ids(3, 90), *SHARED, *random_ids(4, 10)]
HINT = ChunkPlaces(100, 130, (("r", 140),))


def find_runs(hints=(HINT,), gaps=((4, 309),), prompt=PROMPT, least=48, **records):
    tokens_of = {name: as_tokens(ids) for name, ids in {"r": RECORD, **records}.items()}
    return same_runs(as_tokens(prompt), gaps, hints, tokens_of, least)


def test_run_extends_as_far_as_tokens_agree():
    assert find_runs() == [SameRun("r", 90, 290, 50)]
    assert find_runs()[0].without_first(16) == SameRun("r", 106, 290, 66)


def test_wrong_hint_yields_no_run():
    wrong = ChunkPlaces(100, 130, (("r", 141), ("r", 5_000), ("r", 0)))
    assert find_runs([wrong]) == []


def test_runs_stay_within_gaps_and_do_not_overlap():
    assert find_runs(gaps=((60, 110), (115, 240))) == [
        SameRun("r", 100, 150, 60),
        SameRun("r", 155, 280, 115),
    ]
    assert find_runs(gaps=((60, 100),)) == []


def test_longest_run_of_several_records_is_chosen():
    hint = ChunkPlaces(100, 130, (("s", 66), ("r", 140)))
    assert find_runs([hint], s=[*random_ids(5, 16), *SHARED[:140]]) == [SameRun("r", 90, 290, 50)]


def test_sink_tokens_of_a_record_are_in_no_run():
    hint = ChunkPlaces(50, 80, (("s", 0),))
    [run] = find_runs([hint], s=SHARED)
    assert run == SameRun("s", EDIT_SINK_TOKENS, 200, 50 + EDIT_SINK_TOKENS)


def test_only_the_longest_runs_are_kept():
    prompt, hints = [], []
    for number in range(SPANS_MAX + 10):
        start = number % 5 * 20
        part = SHARED[start : start + 60 + number % 5]
        hints.append(ChunkPlaces(len(prompt), len(prompt) + 16, (("r", 90 + start),)))
        prompt += [*part, number]
    runs = find_runs(hints, [(0, len(prompt))], prompt, least=20)
    assert len(runs) == SPANS_MAX
    assert runs == sorted(runs, key=lambda run: run.new_start)
