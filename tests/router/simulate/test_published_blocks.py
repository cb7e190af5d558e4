"""Blocks are visible when a node would have published them, and no earlier."""

import random

import pytest

from fabric.control.node_calls import ListAgents
from router.simulate import node_cache
from router.simulate.node_cache import KeptAgent, NodeCache
from router.simulate.prefix_tree import PrefixTree
from tests.router.simulate.small import FAST_DECODE, OneNode, node, prompt

HEAD, OWN, AGENTS = 4_096, 256, 8


def computed_of_burst(**changes):
    """Start agents with one beginning at the same moment; return the computed tokens."""
    one = OneNode(**changes)
    for agent in range(AGENTS):
        one.ask(0.0, f"a{agent}", prompt((1, HEAD), (100 + agent, OWN)))
    one.run()
    assert len(one.end_s) == AGENTS
    return one.machine.engine.computed_tokens


def test_prefix_in_flight_is_not_visible():
    assert computed_of_burst(shares_heads_in_flight=False) == AGENTS * (HEAD + OWN)


def test_common_prefix_is_computed_once_while_others_wait():
    assert computed_of_burst() == HEAD + AGENTS * OWN


def test_turn_waiting_for_prefix_holds_no_memory():
    """Memory for two turns: all wait for the first one's beginning, then run two at a time."""
    tokens = HEAD + OWN + 512
    one = OneNode(node(hot_bytes=2 * tokens * 36_864, decode_tokens_per_s=10.0))
    for agent in range(4):
        one.ask(0.0, f"a{agent}", prompt((1, HEAD), (100 + agent, OWN)), answer_tokens=20)
    held = []
    one.timeline.at(4.0, lambda: held.append(one.machine.cache.hot_bytes))
    one.run()

    assert held == [tokens * 36_864]
    assert one.machine.engine.computed_tokens == HEAD + 4 * OWN


def test_wait_for_prefix_is_bounded_by_computing_it():
    """Another long prompt delays the prefix; the waiting turn computes the rest itself."""
    one = OneNode(node(decode_tokens_per_s=FAST_DECODE))
    one.ask(0.0, "other", prompt((9, 30_000)))
    one.ask(0.1, "leads", prompt((1, HEAD), (2, OWN)))
    one.ask(0.2, "waits", prompt((1, HEAD), (3, OWN)))
    one.run()

    assert one.first_s["waits"] < 4 * HEAD / 512
    assert one.machine.engine.computed_tokens <= 30_000 + 2 * (HEAD + OWN)


def test_prefix_of_another_turn_is_loaded_from_disk():
    one = OneNode(node(disk_bytes_per_s=36_864 * 1_024.0, decode_tokens_per_s=FAST_DECODE))
    one.ask(0.0, "leads", prompt((1, HEAD), (2, OWN)))
    one.ask(0.1, "waits", prompt((1, HEAD), (3, OWN)))
    one.run()

    loaded_s = HEAD / 1_024
    assert one.first_s["waits"] == pytest.approx((HEAD + OWN) / 512 + loaded_s - 0.1, abs=0.51)


def test_prematurely_visible_blocks_are_detected(monkeypatch):
    """The injected fault: a prompt's blocks are visible as soon as its turn has memory."""
    start = node_cache.NodeCache.reserve

    def publish_too_early(self, agent, tokens, *, is_alone):
        self.answer(agent, arrived[agent], -1e9)
        return start(self, agent, tokens, is_alone=is_alone)

    arrived = {f"a{n}": prompt((1, HEAD), (100 + n, OWN)) for n in range(AGENTS)}
    monkeypatch.setattr(node_cache.NodeCache, "reserve", publish_too_early)

    with pytest.raises(AssertionError):
        test_prefix_in_flight_is_not_visible()


def test_blocks_of_running_answer_appear_one_by_one():
    """9.4 MB at 1 GB/s are 9.4 ms, and a saver takes a twentieth of the time."""
    cache = NodeCache(1 << 34, 1 << 40, 36_864, 1e9)
    cache.answer("a", prompt((1, 2_560)), now_s=10.0)
    block_s = 256 * 36_864 / 1e9 * 20
    other = prompt((1, 2_560), (2, 512))

    def visible_tokens(after_s):
        return cache.look_up("b", other, 10.0 + after_s).tokens

    assert visible_tokens(0.2) == 0
    assert visible_tokens(0.25) == 256
    assert visible_tokens(0.25 + 1.01 * block_s) == 512
    assert visible_tokens(1e6) == 2_560
    cache.end_answer("a")
    assert visible_tokens(1e6) == 0


def test_own_cache_is_reused_by_token_and_foreign_cache_by_block():
    cache = NodeCache(1 << 34, 1 << 40, 36_864, 1e9)
    cache.keep(KeptAgent("a", prompt((1, 1_000)), (1,), 1, 1), is_hot=True)
    longer = prompt((1, 1_000), (2, 100))

    own, other = cache.look_up("a", longer, 0.0), cache.look_up("b", longer, 0.0)
    same = cache.look_up("a", prompt((1, 1_000)), 0.0)

    assert (own.tokens, own.disk_tokens) == (1_000, 0)
    assert (other.tokens, other.disk_tokens) == (768, 768)
    assert same.tokens == 999  # the last token is always computed


def test_full_disk_evicts_least_recently_used_agents():
    cache = NodeCache(1 << 34, 2_000 * 36_864, 36_864, 1e9)
    for number in range(4):
        cache.keep(KeptAgent(f"a{number}", prompt((number, 600)), (1,), 1, 1), is_hot=False)

    assert cache.evicted == ["a0"]
    assert list(cache.agents) == ["a1", "a2", "a3"]
    assert cache.disk_tokens == 1_800


def test_node_lists_agents_evicted_from_memory_and_disk():
    one = OneNode(node(hot_bytes=1_500 * 36_864, disk_bytes=3_000 * 36_864))
    one.ask(0.0, "a", prompt((1, 900)))
    one.run()
    before = one.machine.view().changes
    listed = one.machine.list_agents(ListAgents()).agents
    for number in range(3):
        one.ask(0.0, f"b{number}", prompt((5 + number, 900)))
    one.run()
    news = one.machine.list_agents(ListAgents(incarnation=1, since=before))

    assert [each.view.tiers for each in listed] == [("hot", "disk")]
    assert [name.agent for name in news.gone] == ["a"]
    assert {each.view.agent: each.view.tiers for each in news.agents} == {
        "b0": ("disk",),
        "b1": ("disk",),
        "b2": ("hot", "disk"),
    }


def test_shared_prefix_is_stored_once():
    cache = NodeCache(1 << 34, 1 << 40, 36_864, 1e9)
    for number in range(3):
        extent = prompt((7, 1_024), (number, 128))
        cache.keep(KeptAgent(f"a{number}", extent, (1,), 1, 1), is_hot=False)

    assert cache.disk_tokens == 1_024 + 3 * 128
    for number in range(3):
        cache.drop(f"a{number}")
    assert cache.look_up("b", prompt((7, 1_024), (9, 128)), 0.0).tokens == 0


def common_length(one, other):
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal.index(False) if False in equal else len(equal)


@pytest.mark.parametrize("seed", range(5))
def test_prefix_tree_equals_linear_search(seed):
    rng, tree, chains = random.Random(seed), PrefixTree(), []

    def chain():
        base = (
            list(rng.choice(chains)[: rng.randint(0, 9)]) if chains and rng.random() < 0.7 else []
        )
        # Chained hashes: a piece after other pieces is another piece.
        while len(base) < rng.randint(1, 9):
            base.append(hash((tuple(base), rng.randint(0, 2))) & 0xFFFF_FFFF)
        return base

    for _ in range(400):
        if chains and rng.random() < 0.4:
            gone = chains.pop(rng.randrange(len(chains)))
            tree.remove(gone)
        else:
            new = chain()
            assert tree.add(new) == max((common_length(new, each) for each in chains), default=0)
            chains.append(new)
        probe = chain()
        assert tree.longest(probe) == max(
            (common_length(probe, each) for each in chains), default=0
        )
