"""Speeds of nodes, learnt from their turns."""

from dataclasses import replace

import pytest

from router.placement.profiles import Profiles, PromptProgress
from tests.router.placement.snapshots import view

CHUNK = 1_024


def profiles_of(reported=1_000.0, decode=40.0):
    known = {"a": view("a", prefill=reported, decode=decode)}
    return Profiles(known.get), known


def compute(profiles, rate, chunks=20, begin=0, name="a"):
    """Have a node compute a prompt at a rate, a chunk at a time."""
    now_s, tokens, before = 100.0, begin, None
    for _ in range(chunks + 1):
        profiles.note_progress(name, before, tokens, now_s)
        before = PromptProgress(tokens, now_s)
        tokens, now_s = tokens + CHUNK, now_s + CHUNK / rate


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.6])
def test_wrong_speed_is_corrected_within_one_long_prompt(factor):
    profiles, _ = profiles_of()
    compute(profiles, 1_000.0 * factor)

    assert profiles.of("a").prefill_tokens_per_s(1_000.0, 8_000) == pytest.approx(
        1_000.0 * factor, rel=0.05
    )


def test_speeds_are_learnt_by_position():
    profiles, _ = profiles_of()
    compute(profiles, 1_000.0, chunks=3)
    compute(profiles, 500.0, begin=20_000)
    profile = profiles.of("a")

    assert profile.prefill_tokens_per_s(1_000.0, 1_000) == pytest.approx(1_000.0, rel=0.05)
    assert profile.prefill_tokens_per_s(1_000.0, 30_000) == pytest.approx(500.0, rel=0.05)
    assert profile.prefill_tokens_per_s(1_000.0, 200_000) == pytest.approx(500.0, rel=0.05)


def test_prompts_in_turns_do_not_lower_the_speed():
    profiles, _ = profiles_of()
    now_s, before = 0.0, [None, None]
    tokens = [0, 0]
    for at in range(40):
        which = at % 2
        profiles.note_progress("a", before[which], tokens[which], now_s)
        before[which] = PromptProgress(tokens[which], now_s)
        tokens[which] += CHUNK
        now_s += CHUNK / 1_000.0

    assert profiles.of("a").prefill_tokens_per_s(1_000.0, 4_000) == pytest.approx(1_000.0, rel=0.05)


def test_long_pause_counts_as_a_quarter_of_the_speed():
    profiles, _ = profiles_of()
    profiles.note_progress("a", PromptProgress(0, 0.0), CHUNK, 500.0)

    assert profiles.of("a").prefill_tokens_per_s(1_000.0) >= 250.0


def test_decode_speed_is_learnt_by_batch():
    profiles, _ = profiles_of()
    for _ in range(60):
        profiles.note_answer("a", PromptProgress(1, 0.0), 200, 10.0, 1)
        profiles.note_answer("a", PromptProgress(1, 0.0), 200, 40.0, 4)
    profile = profiles.of("a")

    assert profile.decode_tokens_per_s(40.0, 1) == pytest.approx(20.0, rel=0.1)
    assert profile.decode_tokens_per_s(40.0, 4) == pytest.approx(10.0, rel=0.1), "per answer"


def test_prompts_beside_an_answer_are_no_part_of_its_speed():
    profiles, _ = profiles_of()
    for _ in range(40):
        first = profiles.note_progress("a", None, 1, 100.0)
        compute(profiles, 1_000.0, chunks=20)  # from then on
        profiles.note_answer("a", first, 200, 100.0 + 20 * CHUNK / 1_000.0 + 5.0, 1)

    assert profiles.of("a").decode_tokens_per_s(40.0, 1) == pytest.approx(40.0, rel=0.1)


def test_unmeasured_node_gets_no_profile():
    profiles, _ = profiles_of(reported=0.0, decode=0.0)
    compute(profiles, 9_000.0)
    profiles.note_answer("a", PromptProgress(1, 0.0), 200, 1.0, 1)

    assert profiles.of("a").prefill_tokens_per_s(0.0) == 0.0
    assert profiles.of("a").decode_tokens_per_s(0.0) == 0.0
    assert not profiles.changed


def test_restarted_node_gets_a_new_profile():
    profiles, known = profiles_of()
    compute(profiles, 500.0)
    assert profiles.changed == {"a"}
    known["a"] = replace(known["a"], incarnation=2)
    profiles.note_progress("a", None, 0, 900.0)

    assert profiles.of("a").prefill_tokens_per_s(1_000.0) == 1_000.0


def test_unknown_node_gets_no_profile():
    profiles, _ = profiles_of()
    compute(profiles, 500.0, name="gone")

    assert profiles.of("gone").prefill_tokens_per_s(7.0) == 7.0
