"""A modelled node against closed forms and the guarantees of a real node's schedule."""

import random
from statistics import fmean

import pytest

from tests.router.simulate.small import FAST_DECODE, GIB, OneNode, node, prompt


def test_single_turn_takes_prefill_and_decode_time():
    one = OneNode()
    one.ask(0.0, "a", prompt((1, 1024)), answer_tokens=11)
    one.run()

    assert one.first_s["a"] == pytest.approx(1024 / 512 + 1 / 50)
    assert one.end_s["a"] == pytest.approx(1024 / 512 + 11 / 50, abs=0.01)  # and its last save


def test_prefill_slows_down_with_context():
    """With half the speed at position h, n tokens take about n/P · (1 + n/2h)."""
    one = OneNode(node(context_half_tokens=8_192, decode_tokens_per_s=FAST_DECODE))
    one.ask(0.0, "a", prompt((1, 8_192)))
    one.run()

    assert one.first_s["a"] == pytest.approx(8_192 / 512 * 1.5, rel=0.04)  # chunk by chunk


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waits_of_equal_prompts_match_md1_queue(load):
    """M/D/1: random arrivals, equal work S = 1 s; the mean wait is load · S / 2(1 - load)."""
    rng, one, at_s = random.Random(3), OneNode(node(decode_tokens_per_s=FAST_DECODE)), 0.0
    free_s, waits_s = 0.0, []
    for number in range(6_000):
        at_s += rng.expovariate(load)
        one.ask(at_s, f"a{number}", prompt((number + 1, 512)))
        waits_s.append(max(0.0, free_s - at_s))
        free_s = max(free_s, at_s) + 1.0
    one.run()

    assert list(one.first_s.values()) == pytest.approx([1.0 + each for each in waits_s], abs=1e-3)
    assert fmean(waits_s) == pytest.approx(load / (2 * (1 - load)), rel=0.1)


def test_long_prompts_alternate_in_chunks():
    """Two equal long prompts take turns, so both end near the end of both."""
    one = OneNode(node(decode_tokens_per_s=FAST_DECODE))
    for agent in (1, 2):
        one.ask(0.0, f"a{agent}", prompt((agent, 8_192)))
    one.run()

    first, second = sorted(one.first_s.values())
    assert second == pytest.approx(2 * 8_192 / 512)
    assert first == pytest.approx(second - 2.0)  # a chunk of each in turn


def test_chunks_are_as_large_as_the_device_computes_best():
    """Of two long prompts, the first one's chunk ends sooner where chunks are shorter."""
    fast, answers = node(prefill_tokens_per_s=4_096.0, decode_tokens_per_s=FAST_DECODE), {}
    for most in (512, 4_096):
        one = OneNode(fast, chunk_tokens_max=most)
        one.ask(0.0, "long", prompt((1, 8_192)))
        one.ask(0.01, "short", prompt((2, 256)))
        one.run()
        answers[most] = one.first_s["short"]

    assert answers[512] == pytest.approx(0.125 + 256 / 4_096 - 0.01, abs=1e-3)
    assert answers[4_096] == pytest.approx(1.0 + 256 / 4_096 - 0.01, abs=1e-3)


def test_short_prompt_overtakes_long_one():
    one = OneNode(node(decode_tokens_per_s=FAST_DECODE))
    one.ask(0.0, "long", prompt((1, 16_384)))
    one.ask(0.1, "short", prompt((2, 256)))
    one.run()

    assert one.first_s["short"] < 2.0 < one.first_s["long"]


def test_decode_slows_with_square_root_of_batch_size():
    one = OneNode(node(prefill_tokens_per_s=1e9))
    for agent in range(4):
        one.ask(0.0, f"a{agent}", prompt((agent, 128)), answer_tokens=100)
    one.run()

    assert max(one.end_s.values()) == pytest.approx(100 * 2 / 50, rel=0.03)


def test_prefill_slows_decode_but_never_stops_it():
    one = OneNode()
    one.ask(0.0, "answers", prompt((1, 128)), answer_tokens=50)
    one.ask(0.5, "reads", prompt((2, 5_120)))
    one.run()

    alone_s = 128 / 512 + 50 / 50
    assert alone_s < one.end_s["answers"] < alone_s + 50 * 0.25  # at most a busy chunk a token
    assert one.first_s["reads"] > 5_120 / 512


def test_turns_wait_for_free_memory():
    """Two turns do not fit together: the second begins when the first has ended."""
    small = node(hot_bytes=1_000 * 36_864, decode_tokens_per_s=10.0)
    one = OneNode(small)
    one.ask(0.0, "a", prompt((1, 384)), answer_tokens=10)
    one.ask(0.0, "b", prompt((2, 384)), answer_tokens=10)
    one.run()

    assert one.first_s["b"] > one.end_s["a"] - 0.1


def test_cache_on_disk_is_loaded_instead_of_recomputed():
    """An idle cache that lost its memory is loaded at the disk's speed instead of computed."""
    one = OneNode(node(hot_bytes=3_000 * 36_864, disk_bytes_per_s=36_864_000.0))
    one.ask(0.0, "a", prompt((1, 2_048)))
    one.ask(10.0, "b", prompt((2, 2_048)))  # takes the memory
    one.ask(30.0, "a2", prompt((1, 2_048), (3, 128)))
    one.run()

    # 2,048 tokens at 1,000 a second from the disk, then 128 at 512, and a step.
    assert one.first_s["a2"] == pytest.approx(2.048 + 128 / 512 + 0.02, abs=0.01)


def test_lost_node_loses_each_turn_once():
    one = OneNode()
    one.ask(0.0, "reads", prompt((1, 5_120)))
    one.ask(0.0, "answers", prompt((2, 128)), answer_tokens=1_000)
    one.timeline.at(3.0, one.machine.die)
    one.run()

    assert sorted(one.lost) == ["answers", "reads"]
    assert one.end_s == {}
    assert one.machine.cache.hot_bytes == 0
    assert one.machine.engine.active_count == 0


def test_slowed_node_takes_proportionally_longer():
    one = OneNode(node(hot_bytes=GIB))
    one.machine.engine.slowness = 3.0
    one.ask(0.0, "a", prompt((1, 512)))
    one.run()

    assert one.first_s["a"] == pytest.approx(3 * (1.0 + 1 / 50))
