"""Handover of a running turn: copied ahead, sealed in one write, hot on arrival."""

import asyncio
import json
import threading
from contextlib import contextmanager
from functools import partial

import jsonschema
import pytest

from fabric.control.node_calls import (
    AbortMigration,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
    Done,
    Flush,
    Offer,
    OfferMigration,
    ReleaseAgent,
    SealAgent,
)
from fabric.errors import RetryElsewhereError
from fabric.ids import AgentId, MigrationId, OperationId
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import OwnerState, decode_manifest
from fabric.turn.generation import (
    CacheTier,
    Delta,
    Finished,
    GenerateRequest,
    HandedOver,
    Sampling,
)
from node.agents.outgoing import OutgoingState
from node.engine.memory_budget import Reservation
from tests.support.architectures import SMALL_ARCHITECTURES
from tests.support.formats import PLACE, schema
from tests.support.samples import sample
from tests.support.services import TENANT, ask, call, identity_of, running
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_until

PROMPT = "the cat sat on the mat and the dog sat on the log. " * 90  # more than three blocks
ANSWER_TOKENS = 340  # more than one further block
PLACES = {"type": "array", "items": PLACE, "minItems": 4, "maxItems": 4}


@pytest.fixture(scope="module", params=sample(["llama", "gemma4_text", "qwen3_5"], "llama"))
def nodes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = str(write_model(folder / "model", SMALL_ARCHITECTURES[request.param]))
    with running(folder, model, "node-a") as a, running(folder, model, "node-b") as b:
        yield a, b


@pytest.fixture(scope="module")
def undisturbed(nodes):
    return ask(nodes[0], PROMPT, agent="calm", max_tokens=ANSWER_TOKENS, ignore_eos=True).text


class Stream:
    """A turn read while it is generated, on the node's own loop."""

    def __init__(
        self, service, agent, resume=None, epoch=1, after=None, output=None, prompt_options=None
    ):
        is_endless = output is None and (prompt_options is None or "edits" in prompt_options)
        tokens = ANSWER_TOKENS if prompt_options is None or is_endless else 10 * ANSWER_TOKENS
        sampling = Sampling(max_tokens=tokens, ignore_eos=is_endless, output=output)
        self._request = GenerateRequest(
            OperationId(f"turn-{agent}-{epoch}"), TENANT, identity_of(agent), sampling,
            **(prompt_options or {"prompt": PROMPT}), epoch=epoch, resume=resume,
            was_admitted=resume is not None, after=after,
        )  # fmt: skip
        self.events, self._service, self._seen = [], service, asyncio.Condition()
        self._future = asyncio.run_coroutine_threadsafe(self._read(), service._loop)

    async def _read(self):
        async for event in self._service.node.turns.serve(self._request):
            async with self._seen:
                self.events.append(event)
                self._seen.notify_all()

    def wait_for_token(self, number):
        def has_token():
            return any(isinstance(e, Delta) and e.index >= number for e in self.events)

        async def wait():
            async with self._seen:
                await self._seen.wait_for(has_token)

        asyncio.run_coroutine_threadsafe(wait(), self._service._loop).result(120)

    def end(self):
        self._future.result(240)
        return self.events

    @property
    def text(self):
        return "".join(event.text for event in self.events if isinstance(event, Delta))


one_class = pytest.mark.parametrize("nodes", ["llama"], indirect=True)


def move_of(agent):
    return MigrationId(f"move-{agent}")


def move_call(kind, node, agent, epoch=1):
    return kind(TENANT, AgentId(agent), epoch, move_of(agent), node.node.name)


def copy(source, target, offer):
    move = move_of(decode_manifest(offer.manifest).agent)
    return call(target, CopyBlocks(move, source.node.name, offer), Copied)


def copied_stream(source, target, agent, tokens=1, **more):
    """Begin an answer, and copy the agent's blocks after `tokens` tokens."""
    stream = Stream(source, agent, **more)
    stream.wait_for_token(tokens)
    copy(source, target, call(source, move_call(OfferMigration, target, agent), Offer))
    return stream


def wait_for_early_turn(service):
    wait_until(lambda: service.node.moves.incoming.waiting_count)


def agent_at(service, agent):
    return service.node.resources.table.get((TENANT, AgentId(agent)))


def test_running_turn_is_copied_incrementally_and_continues_hot(nodes, undisturbed):
    a, b = nodes
    stream = Stream(a, "growing")
    stream.wait_for_token(1)
    first = call(a, move_call(OfferMigration, b, "growing"), Offer)
    assert first.live
    assert copy(a, b, first).blocks_sent >= len(PROMPT) // 10 // BLOCK_TOKENS // 4
    stream.wait_for_token(BLOCK_TOKENS + 40)
    later = call(a, move_call(OfferMigration, b, "growing"), Offer)
    grown = decode_manifest(later.manifest)
    assert grown.tokens_count > decode_manifest(first.manifest).tokens_count
    assert grown.tokens_count % BLOCK_TOKENS == 0
    copy(a, b, later)

    sealed = call(a, move_call(SealAgent, b, "growing"), Offer)
    record = agent_at(a, "growing").saved
    assert (record.state, record.migration) == (OwnerState.SEALED, move_of("growing"))
    before = record.revision
    assert call(a, move_call(SealAgent, b, "growing"), Offer).manifest == sealed.manifest
    assert agent_at(a, "growing").saved.revision == before == 1  # one write for turn and seal
    commit = CommitMigration(move_of("growing"), a.node.name, sealed, 2)
    tail = call(b, commit, Committed).copied
    full_blocks_left = record.tokens_count // BLOCK_TOKENS - grown.tokens_count // BLOCK_TOKENS
    groups = len(b.node.resources.identity.spec.groups)
    assert tail.blocks_sent <= full_blocks_left + 1 + (groups - 1) * (full_blocks_left + 3)
    assert call(b, commit, Committed).copied.blocks_sent == 0  # repeatable
    assert agent_at(b, "growing").cache.tokens_count == record.tokens_count

    handed = stream.end()[-1]
    assert isinstance(handed, HandedOver)
    on = Stream(b, "growing", handed.resume, epoch=2)
    finished = on.end()
    assert finished[0].cache is CacheTier.HOT
    assert stream.text + on.text == undisturbed


@pytest.mark.parametrize("tokens", sample([1, 33], 33))
def test_answer_moved_inside_an_object_still_fits_its_schema(nodes, tokens):
    a, b = nodes
    output, agent = schema(PLACES), f"places-{tokens}"
    whole = ask(a, PROMPT, agent="calm places", max_tokens=ANSWER_TOKENS, output=output)
    jsonschema.validate(json.loads(whole.text), PLACES)

    stream = copied_stream(a, b, agent, tokens, output=output)
    sealed = call(a, move_call(SealAgent, b, agent), Offer)
    call(b, CommitMigration(move_of(agent), a.node.name, sealed, 2), Committed)
    handed = stream.end()[-1]
    assert len(handed.resume.answer_ids) >= tokens
    assert isinstance(handed, HandedOver)
    on = Stream(b, agent, handed.resume, epoch=2, output=output)
    assert isinstance(on.end()[-1], Finished)
    assert stream.text + on.text == whole.text


@pytest.mark.nightly
@one_class
def test_aborted_move_frees_target_memory_and_source_continues(nodes, undisturbed):
    a, b = nodes
    stream = copied_stream(a, b, "staying")
    assert b.node.moves.warm_up.size_bytes > 0
    call(a, move_call(SealAgent, b, "staying"), Offer)
    abort = AbortMigration(TENANT, AgentId("staying"), move_of("staying"))
    call(b, abort, Done)
    call(a, abort, Done)
    assert b.node.moves.warm_up.size_bytes == 0
    assert agent_at(a, "staying").manifest.state is OwnerState.OWNED

    on = Stream(a, "staying", stream.end()[-1].resume)
    on.end()
    assert stream.text + on.text == undisturbed


@one_class
def test_turn_waiting_for_memory_is_admitted_before_handover(nodes):
    a, b = nodes
    ask(a, PROMPT, agent="waiting", max_tokens=4)
    call(a, Flush(drop_hot=True), Done)
    others = Reservation(a.node.resources.engine.budget)
    others.count(a.node.resources.engine.budget.claimable_bytes)
    try:
        stream = Stream(a, "waiting")
        wait_until(lambda: a.node.resources.engine.waiting_count)
        call(a, move_call(SealAgent, b, "waiting"), Offer)
        admitted, handed = stream.end()
    finally:
        others.release()
    assert (admitted.cache, admitted.agent) == (CacheTier.DISK, "waiting")
    assert handed == HandedOver(None)
    call(a, AbortMigration(TENANT, AgentId("waiting"), move_of("waiting")), Done)


@pytest.mark.nightly
@one_class
def test_abort_overtaking_the_seal_keeps_the_turn(nodes, undisturbed):
    a, b = nodes
    stream = Stream(a, "kept")
    stream.wait_for_token(1)

    async def seal_and_abort():
        turn = agent_at(a, "kept").turn
        turn.hand_over(move_call(SealAgent, b, "kept"))
        await turn.keep(MigrationId("another-move"))
        assert agent_at(a, "kept").outgoing.state is OutgoingState.ASKED
        await turn.keep(move_of("kept"))

    asyncio.run_coroutine_threadsafe(seal_and_abort(), a._loop).result(60)
    handed = stream.end()[-1]
    assert agent_at(a, "kept").saved.state is OwnerState.OWNED
    on = Stream(a, "kept", handed.resume)
    on.end()
    assert stream.text + on.text == undisturbed


@one_class
def test_memory_pressure_drops_prewarmed_cache_but_not_the_move(nodes, undisturbed):
    a, b = nodes
    stream = copied_stream(a, b, "squeezed")

    async def squeeze():
        b.node.tiers.hot.make_room(b.node.tiers.hot.limit_bytes)
        return b.node.moves.warm_up.size_bytes

    assert asyncio.run_coroutine_threadsafe(squeeze(), b._loop).result(60) == 0
    sealed = call(a, move_call(SealAgent, b, "squeezed"), Offer)
    call(b, CommitMigration(move_of("squeezed"), a.node.name, sealed, 2), Committed)
    on = Stream(b, "squeezed", stream.end()[-1].resume, epoch=2)
    assert on.end()[0].cache is CacheTier.PEER
    assert stream.text + on.text == undisturbed


@one_class
def test_owner_with_a_lost_block_still_steps_down(nodes):
    a, b = nodes
    ask(a, PROMPT, agent="hurt", max_tokens=4)
    record, node = agent_at(a, "hurt").saved, a.node
    middle = record.pieces[1].block
    (path,) = node.resources.identity.config.data_dir.rglob(f"{middle.name}.*")
    path.write_bytes(b"damaged")
    node.resources.store.blocks.verify([middle])
    assert node.resources.store.missing(record) == [middle]

    move = move_of("hurt")
    call(a, ReleaseAgent(TENANT, AgentId("hurt"), 5, move, b.node.name), Done)
    left = agent_at(a, "hurt").saved
    assert (left.state, left.epoch, left.owner) == (OwnerState.REPLICA, 5, b.node.name)
    assert left.tokens_count == BLOCK_TOKENS


@one_class
def test_turn_sent_before_commit_continues_after_commit(nodes, undisturbed):
    a, b = nodes
    stream = copied_stream(a, b, "ahead", tokens=5)
    sealed = call(a, move_call(SealAgent, b, "ahead"), Offer)
    handed = stream.end()[-1]
    on = Stream(b, "ahead", handed.resume, epoch=2, after=move_of("ahead"))
    wait_for_early_turn(b)
    assert agent_at(b, "ahead") is None, "the turn starts no new agent"

    call(b, CommitMigration(move_of("ahead"), a.node.name, sealed, 2), Committed)
    assert on.end()[0].cache is CacheTier.HOT
    assert stream.text + on.text == undisturbed
    # If the commit came before the turn, the turn does not wait.
    again = Stream(b, "ahead", epoch=2, after=move_of("ahead"))
    assert isinstance(again.end()[-1], Finished)


@one_class
def test_turn_sent_before_an_aborted_move_is_refused_as_retry_elsewhere(nodes):
    a, b = nodes
    stream = Stream(a, "returned")
    stream.wait_for_token(1)
    call(a, move_call(SealAgent, b, "returned"), Offer)
    resume, move = stream.end()[-1].resume, move_of("returned")
    ahead = Stream(b, "returned", resume, epoch=2, after=move)
    wait_for_early_turn(b)
    for service in (b, a):
        call(service, AbortMigration(TENANT, AgentId("returned"), move), Done)
    with pytest.raises(RetryElsewhereError, match="move to this node failed"):
        ahead.end()
    late = Stream(b, "returned", resume, epoch=2, after=move)
    with pytest.raises(RetryElsewhereError):
        late.end()
    assert agent_at(b, "returned") is None


@contextmanager
def full_threads(*services):
    """Fill all threads that other work may use."""
    over = threading.Event()
    workers = [each.node.resources.workers for each in services]
    pools = [pool for each in workers for pool in (each._workers, each._fetchers)]
    jobs = [pool.submit(over.wait) for pool in pools for _ in range(pool._max_workers)]
    try:
        yield
    finally:
        over.set()
        for job in jobs:
            job.result(60)


@one_class
def test_handover_does_not_wait_for_busy_worker_threads(nodes, undisturbed, monkeypatch):
    a, b = nodes
    stream, calls = copied_stream(a, b, "hasty", tokens=5), []
    for service in nodes:
        moving = service.node.resources.engine.moving
        for name in ("begin_pause", "end_pause"):
            recorder = partial(record_call, calls, service, name, getattr(moving, name))
            monkeypatch.setattr(moving, name, recorder)
    assert b.node.resources.engine.moving.are_coming
    with full_threads(a, b):
        sealed = call(a, move_call(SealAgent, b, "hasty"), Offer)
        handed = stream.end()[-1]
        on = Stream(b, "hasty", handed.resume, epoch=2, after=move_of("hasty"))
        call(b, CommitMigration(move_of("hasty"), a.node.name, sealed, 2), Committed)
        on.wait_for_token(len(handed.resume.answer_ids) + 2)
        assert not b.node.resources.engine.moving.are_coming
    assert on.end()[0].cache is CacheTier.HOT
    assert stream.text + on.text == undisturbed
    assert calls[:2] == [(a, "begin_pause"), (a, "end_pause")]
    assert next(name for service, name in calls if service is b) == "begin_pause"
    assert calls[-1] == (b, "end_pause"), [(s is b, n) for s, n in calls]


def record_call(calls, service, name, inner, move):
    if move == move_of("hasty"):
        calls.append((service, name))
    inner(move)
