"""Memory of arriving agents is reserved before it is allocated, and counted while it is read."""

import asyncio
import threading
from dataclasses import replace

import pytest

from fabric.control.node_calls import AgentView, Done, Flush, PrefetchAgent
from fabric.edit_mode import EditMode
from fabric.errors import CorruptDataError
from fabric.ids import AgentId, MigrationId
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import OwnerState
from fabric.record.piece_table import PieceTable
from fabric.u32s import U32s
from node.engine.memory_budget import Reservation
from node.migration import warm_up
from tests.node.turn.test_edited_turns import start
from tests.support.on_loop import change
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import ONE_LAYER, write_model

PROMPT = "the cat sat on the mat and the dog sat on the log. " * 90  # more than three blocks
HANG_S = 60


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    with running(folder, str(write_model(folder / "model", ONE_LAYER))) as service:
        ask(service, PROMPT, agent="stored", max_tokens=6, ignore_eos=True)
        yield service


@pytest.fixture
def move(node, request):
    """Name a move of this test, with no other cache in memory."""
    call(node, Flush(drop_hot=True), Done)
    budget = node.node.resources.engine.budget
    assert (budget.reserved_bytes, budget.idle_bytes) == (0, 0)
    name = MigrationId(f"move-{request.node.name}"[:60])
    yield name
    on_loop(node, lambda: node.node.moves.warm_up.drop(name))
    assert (budget.reserved_bytes, budget.idle_bytes) == (0, 0)


@pytest.fixture
def record(node):
    return node.node.resources.table.get((TENANT, AgentId("stored"))).saved


def on_loop(service, work):
    async def run():
        return work()

    return asyncio.run_coroutine_threadsafe(run(), service._loop).result(HANG_S)


def extend(service, move, record):
    work = service.node.moves.warm_up.extend(move, record)
    return asyncio.run_coroutine_threadsafe(work, service._loop)


def first_block_record(record):
    """Return the record as it was when its first block was full."""
    return replace(
        record,
        token_ids=record.token_ids[:BLOCK_TOKENS],
        token_ends=record.token_ends[:BLOCK_TOKENS],
        pieces=record.pieces.slice(0, BLOCK_TOKENS),
    )


def sealed_record(record):
    return replace(record, state=OwnerState.SEALED)


class ReadGate:
    """A gate that blocks the reads of blocks until it is opened."""

    def __init__(self, service, monkeypatch):
        self.is_reading, self.may_read = threading.Event(), threading.Event()
        blocks = service.node.resources.store.blocks
        load = blocks.load_into

        def loaded(*args):
            self.is_reading.set()
            assert self.may_read.wait(HANG_S)
            return load(*args)

        monkeypatch.setattr(blocks, "load_into", loaded)


@pytest.fixture
def gate(node, monkeypatch):
    return ReadGate(node, monkeypatch)


def begin_gated(service, gate, move, record):
    extending = extend(service, move, record)
    assert gate.is_reading.wait(HANG_S)
    return extending


@pytest.mark.parametrize("is_begun", [False, True], ids=["begun", "continued"])
@pytest.mark.parametrize("is_last", [False, True], ids=["full blocks", "all"])
def test_memory_of_arriving_cache_is_reserved_until_kept(
    node, move, record, gate, is_begun, is_last
):
    warm_up, budget = node.node.moves.warm_up, node.node.resources.engine.budget
    if is_begun:
        gate.may_read.set()
        extend(node, move, first_block_record(record)).result(HANG_S)
        assert warm_up.size_bytes == budget.idle_bytes > 0
        gate.may_read.clear()
        gate.is_reading.clear()
    extending = begin_gated(node, gate, move, sealed_record(record) if is_last else record)

    assert budget.reserved_bytes >= node.node.resources.identity.spec.resident_bytes(
        record.tokens_count
    )
    assert (budget.idle_bytes, warm_up.size_bytes) == (0, 0)  # counted once

    gate.may_read.set()
    extending.result(HANG_S)
    assert budget.reserved_bytes == 0
    assert budget.idle_bytes == warm_up.size_bytes > 0
    if is_last:
        cache = on_loop(node, lambda: warm_up.take(move, record))
        assert cache.tokens_count == record.tokens_count
        on_loop(node, node.node.tiers.hot.note)


@pytest.mark.parametrize("is_last", [False, True], ids=["full blocks", "all"])
def test_record_without_tokens_is_accepted(node, move, record, is_last):
    """A first turn that moves before its first block is full."""
    empty = replace(record, token_ids=U32s(), token_ends=U32s(), pieces=PieceTable(), text="")
    extend(node, move, sealed_record(empty) if is_last else empty).result(HANG_S)
    extend(node, move, record).result(HANG_S)
    assert node.node.moves.warm_up.size_bytes > 0


@pytest.mark.parametrize("is_begun", [False, True], ids=["begun", "continued"])
def test_warm_up_does_not_take_memory_in_use(node, move, record, is_begun):
    budget = node.node.resources.engine.budget
    least = node.node.resources.identity.spec.resident_bytes(1)
    if is_begun:
        extend(node, move, first_block_record(record)).result(HANG_S)
        arrival = node.node.moves.incoming.get(move).warm
        change(node, arrival, room_tokens=BLOCK_TOKENS)  # so that it has to grow
    others = Reservation(budget)
    others.count(budget.claimable_bytes - budget.idle_bytes - least)
    try:
        extend(node, move, record).result(HANG_S)
        assert move not in node.node.moves.warm_up
    finally:
        others.release()


def test_warm_up_evicts_idle_durable_agents_only(node, move, record):
    ask(node, PROMPT + "it was warm.", agent="idle", max_tokens=4)
    agent = node.node.resources.table.get((TENANT, AgentId("idle")))
    budget = node.node.resources.engine.budget
    others = Reservation(budget)
    others.count(budget.claimable_bytes - budget.idle_bytes)
    try:
        change(node, agent, is_durable=False)
        extend(node, move, first_block_record(record)).result(HANG_S)
        assert agent.cache is not None
        assert move not in node.node.moves.warm_up

        change(node, agent, is_durable=True)
        extend(node, move, first_block_record(record)).result(HANG_S)
        assert agent.cache is None
        assert move in node.node.moves.warm_up
    finally:
        change(node, agent, is_durable=True)
        others.release()


def evict_all(node, move):
    node.tiers.hot.make_room(node.tiers.hot.limit_bytes)


def drop_move(node, move):
    node.moves.warm_up.drop(move)


def take_without_arrival(node, move):
    assert (
        node.moves.warm_up.take(move, node.resources.table.get((TENANT, AgentId("stored"))).saved)
        is None
    )


@pytest.mark.parametrize("is_last", [False, True], ids=["full blocks", "all"])
@pytest.mark.parametrize("what", [evict_all, drop_move, take_without_arrival])
def test_read_is_abandoned_once_unneeded(node, move, record, gate, what, is_last):
    extending = begin_gated(node, gate, move, sealed_record(record) if is_last else record)
    on_loop(node, lambda: what(node.node, move))
    gate.may_read.set()
    extending.result(HANG_S)
    assert move not in node.node.moves.warm_up


def test_failed_read_releases_its_memory(node, move, record, monkeypatch):
    def fail(*_, **__):
        message = "the disk is gone"
        raise OSError(message)

    monkeypatch.setattr(warm_up, "load_parts", fail)
    with pytest.raises(OSError, match="gone"):
        extend(node, move, record).result(HANG_S)
    assert move not in node.node.moves.warm_up


# --- edited memory ---------------------------------------------------------------------------


@pytest.fixture
def edited_record(node):
    """Return the record of an agent whose memory was edited."""
    name = "edited"
    agent = node.node.resources.table.get((TENANT, AgentId(name)))
    if agent is None:
        following = start(node, name)
        ask(node, following, agent=name, edits=EditMode.AMORTIZE)
        agent = node.node.resources.table.get((TENANT, AgentId(name)))
        call(node, Flush(drop_hot=True), Done)
    return agent.saved


def arranged(cache):
    return cache.tokens_count, tuple(cache.ahead), tuple(cache.shifts)


def row_bytes(cache, tokens_count):
    return [row[:, :tokens_count].tobytes() for row in cache.rows()]


@pytest.mark.parametrize("is_begun", [False, True], ids=["at once", "in two parts"])
def test_arriving_edited_cache_equals_the_one_restored_from_disk(
    node, move, edited_record, is_begun
):
    """Moved rows are included, so that no turn waits for them."""
    count = edited_record.tokens_count
    if is_begun:
        extend(node, move, edited_record).result(HANG_S)
        warm = node.node.moves.incoming.get(move).warm
        assert edited_record.edited.tokens_count <= warm.full.tokens_count < count
        assert warm.full.is_edited
    extend(node, move, sealed_record(edited_record)).result(HANG_S)
    cache = on_loop(node, lambda: node.node.moves.warm_up.take(move, edited_record))
    on_loop(node, node.node.tiers.hot.note)

    call(node, PrefetchAgent(TENANT, AgentId("edited"), 1), AgentView)
    own = node.node.resources.table.get((TENANT, AgentId("edited"))).cache
    assert arranged(cache) == arranged(own)
    assert cache.tokens_count == count
    assert cache.shifts
    assert row_bytes(cache, count) == row_bytes(own, count)
    call(node, Flush(drop_hot=True), Done)


def test_edited_memory_with_a_lost_block_is_not_kept(node, move, edited_record):
    lost = {edited_record.pieces[-2].block}
    blocks = node.node.resources.store.blocks
    load = blocks.load_into

    def fail_if_lost(ref, *args):
        if ref in lost:
            message = "lost"
            raise CorruptDataError(message)
        return load(ref, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "load_into", fail_if_lost)
        extend(node, move, sealed_record(edited_record)).result(HANG_S)
    assert move not in node.node.moves.warm_up
