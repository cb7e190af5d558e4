"""A prompt head shared by agents is computed once in a fabric, and crosses each link once."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from node.engine import heads
from node.transfer import peer_calls
from node.turn import fetched_heads
from node.turn.fetched_heads import FetchedHeads
from router.placement import choice, head_lenders
from router.placement.choice import Policy
from tests.support.agent_traffic import words
from tests.support.local_fabric import local_fabric
from tests.support.shared_heads import Counted, chat

NAMES = ("left", "middle", "right")
TAIL_MOST = 160


@pytest.fixture(autouse=True)
def _disable_time_limits(monkeypatch):
    """Disable time limits, so that a slow machine neither ends waits nor recomputes heads.

    Choices by measured speeds are covered by tests of `head_lenders` and of nodes.
    """
    monkeypatch.setattr(head_lenders, "ship_s", lambda *_: 0.0)
    monkeypatch.setattr(choice, "tie_limit_s", lambda _: math.inf)
    monkeypatch.setattr(FetchedHeads, "_require_sooner", lambda *_: None)
    monkeypatch.setattr(heads, "HEAD_WAIT_FACTOR", 1e6)
    monkeypatch.setattr(fetched_heads, "HEAD_FETCH_EXTRA_S", 60.0)
    monkeypatch.setattr(fetched_heads, "HEAD_GRACE_POLLS", 60)
    for name in ("HEAD_REPLY_S", "HEAD_CONNECT_S"):
        monkeypatch.setattr(peer_calls, name, 60.0)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    options = {"policy": Policy.ROUND_ROBIN, "popular_bytes": 0}
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", *NAMES, **options) as made:
        made.await_agents()
        yield made


@pytest.fixture
def counted_prefills(monkeypatch, fabric):
    return Counted(monkeypatch)


def ask(fabric, name, number, head):
    return fabric.chat(chat(number, head), f"{name}-{number}", max_tokens=4)


def sent_bytes(fabric):
    """Return the total bytes of blocks sent by all nodes."""
    nodes = (fabric.services[name].node for name in NAMES)
    return sum(node.resources.transfers.counts().get("bytes", 0) for node in nodes)


def fetched_counts(fabric):
    """Return the number of blocks fetched by each node."""
    nodes = (fabric.services[name].node for name in NAMES)
    return [node.connections.counts().get("blocks", 0) for node in nodes]


def test_context_is_computed_once_anywhere_and_never_again(fabric, counted_prefills):
    """As in the README's first sentence: three agents with one system prompt, on three nodes."""
    head = words(1, 900)
    first, second, third = [ask(fabric, "one", number, head) for number in range(3)]
    assert {first.node, second.node, third.node} == set(NAMES)
    assert first.cached_tokens == 0
    for later in (second, third):
        computed = counted_prefills.of(fabric.services[later.node])
        assert later.cached_tokens > first.prompt_tokens - TAIL_MOST - 256
        assert later.cache == "peer"
        assert computed <= later.prompt_tokens - later.cached_tokens
    again = [ask(fabric, "one", number, head) for number in range(3)]
    assert all(answer.cached_tokens > first.prompt_tokens - TAIL_MOST for answer in again)


@pytest.mark.parametrize("head_tokens", [1_000, pytest.param(4_000, marks=pytest.mark.nightly)])
def test_eight_concurrent_agents_compute_one_head_on_three_nodes(
    fabric, counted_prefills, head_tokens
):
    """Their head is computed once, and crosses each link once."""
    before, sent, head = fetched_counts(fabric), sent_bytes(fabric), words(2, head_tokens * 7 // 10)
    name = f"eight-{head_tokens}"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: ask(fabric, name, number, head), range(8)))
    assert {answer.node for answer in answers} == set(NAMES)
    assert min(answer.prompt_tokens for answer in answers) > head_tokens
    shared = max(answer.cached_tokens for answer in answers) // 256 * 256
    tails = sum(answer.prompt_tokens - shared for answer in answers)
    assert counted_prefills.tokens <= 1.1 * shared + tails, [
        answer.cached_tokens for answer in answers
    ]
    table = fabric.services[answers[0].node].node.resources.table
    blocks = table.get(("default", f"{name}-0")).saved.pieces.blocks[: shared // 256]
    crossed = sorted(now - then for now, then in zip(fetched_counts(fabric), before, strict=True))
    assert crossed == [0, len(blocks), len(blocks)]
    most = 2 * sum(ref.payload_bytes for ref in blocks)  # fewer if compressed
    assert 0 < sent_bytes(fabric) - sent <= most
