"""Shared prefixes lent to an empty node, between real nodes."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fabric.control.directive_calls import ChangeSettings
from fabric.control.erasure_calls import EraseAgent, EraseReceipt, KnownErasures, ShareErasures
from fabric.control.node_calls import AbortMigration, AgentView, Copied, Done
from fabric.control.span_calls import OfferSpans, ReturnSpans, SpanOffers, TakeSpan
from fabric.errors import FabricError
from fabric.ids import AgentId, MigrationId, NodeName, OperationId, TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import decode_manifest, encode_manifest
from fabric.record.tombstone import tombstone
from fabric.turn.generation import CacheTier
from node.limits import SPAN_LEASE_S
from node.migration.prefix_source import shared_prefixes
from tests.support.architectures import SMALL_ARCHITECTURES
from tests.support.incoming import pinned_blocks
from tests.support.samples import sample
from tests.support.services import KEY, TENANT, ask, call, running
from tests.support.small_node import on_loop
from tests.support.tiny_models import ONE_LAYER, write_model

_names = itertools.count()
SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 30}
OTHER = TenantId("other")


def turn(service, agent, words="naïve café 東京", tenant=TENANT, system=SYSTEM):
    messages = [system, {"role": "user", "content": words}]
    options = {"max_tokens": 4, "ignore_eos": True}
    return ask(service, messages, agent=agent, epoch=1, tenant=tenant, **options)


def offer_spans(source, target):
    name = MigrationId(f"spans-{next(_names):06d}")
    spans = call(source, OfferSpans(name, NodeName(target.node.name)), SpanOffers).spans
    return name, spans


def take_span(source, target, name, span):
    return call(target, TakeSpan(name, NodeName(source.node.name), span.offer), Copied)


def lend(source, target):
    """Lend all offered spans, as the router does."""
    name, spans = offer_spans(source, target)
    copied = [take_span(source, target, name, span) for span in spans]
    for span in spans[:1]:
        call(source, AbortMigration(*span.key, name), Done)
    return spans, copied


@contextmanager
def two_nodes(folder, model, **settings):
    with running(folder, model) as here, running(folder, model, "there", **settings) as there:
        yield here, there


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), ONE_LAYER)


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    with two_nodes(tmp_path_factory.mktemp("nodes"), model) as nodes:
        yield nodes


async def remove_agents(node):
    """Drop everything, tombstones included."""
    node.moves.prefix_target.leases.release_all()
    for agent in node.resources.table:
        agent.cache = None
        node.resources.store.evict([agent.saved])
        node.resources.table.forget(agent)
    node.resources.erased._all = type(node.resources.erased._all)()
    await node.tiers.budget.enforce()
    assert node.resources.store.blocks.total_bytes == 0


@pytest.fixture
def nodes(pair):
    for service in pair:
        service.node.moves.prefix_target.leases._returned.clear()
        on_loop(service, remove_agents(service.node))
    here, there = pair
    turn(here, "alice")
    turn(here, "bob", "other words")
    return here, there


def stored_bytes(service):
    return service.node.resources.store.blocks.total_bytes


def sweep(service):
    service.node.resources.store.blocks.sweep()
    return stored_bytes(service)


@pytest.mark.parametrize("name", sample(["llama", "gemma4_text", "qwen3_5"], "llama"))
def test_new_agent_on_a_new_node_starts_with_lent_prefix(name, tmp_path):
    model = write_model(tmp_path / "model", SMALL_ARCHITECTURES[name])
    with two_nodes(tmp_path, model) as (here, there):
        for agent in ("alice", "bob", "carol"):
            turn(here, agent, f"I am {agent}, and these words are mine. " * 3)
        spans, copied = lend(here, there)
        assert spans
        assert all(len(decode_manifest(s.offer.manifest).text) == 0 for s in spans)
        assert copied[0].blocks_sent > 0
        fresh = turn(there, "dave", "hello").admitted
        assert fresh.cached_tokens >= BLOCK_TOKENS
        assert fresh.cache is CacheTier.DISK
        assert pinned_blocks(there.node) == {}
        assert not here.node.resources.transfers.offers.agents()


def test_only_prefixes_shared_within_a_tenant_are_lent(nodes):
    here, there = nodes
    turn(here, "loner", system={"role": "system", "content": "nobody else is told this. " * 80})
    turn(here, "mallory", tenant=OTHER)  # the same words of another tenant
    _, spans = offer_spans(here, there)
    records = [decode_manifest(span.offer.manifest) for span in spans]
    assert {record.tenant for record in records} == {TENANT}
    assert {span.sharers for span in spans} == {2}
    common = here.node.resources.table.get((TENANT, AgentId("alice"))).manifest.token_ids
    for record in records:
        assert record.tokens_count % BLOCK_TOKENS == 0
        assert list(record.token_ids) == list(common[: record.tokens_count])


def test_lent_prefix_serves_its_tenant_only(nodes):
    here, there = nodes
    lend(here, there)
    assert turn(there, "mallory", tenant=OTHER).admitted.cached_tokens == 0
    assert turn(there, "dave").admitted.cached_tokens > 0


@pytest.mark.parametrize("agents", [("alice", "bob"), ("bob",)])
def test_prefixes_of_private_agents_are_not_lent(nodes, agents):
    here, there = nodes
    for agent in agents:
        call(here, ChangeSettings(TENANT, AgentId(agent), is_private=True), AgentView)
    assert offer_spans(here, there)[1] == ()
    turn(here, "carol")
    assert len(offer_spans(here, there)[1]) == (len(agents) == 1)


def forged_span(span, **changes):
    record = replace(decode_manifest(span.offer.manifest), **changes)
    return replace(span, offer=replace(span.offer, manifest=encode_manifest(record)))


def test_block_names_not_derived_from_the_tokens_are_refused(nodes):
    here, there = nodes
    name, (span, *_) = offer_spans(here, there)
    ids = list(decode_manifest(span.offer.manifest).token_ids)
    before = stored_bytes(there)
    for changes in ({"tenant": OTHER}, {"token_ids": [ids[0] + 1, *ids[1:]]}):
        with pytest.raises(FabricError):
            take_span(here, there, name, forged_span(span, **changes))
    assert stored_bytes(there) == before
    assert not there.node.moves.prefix_target.leases.refs


def test_damaged_block_is_not_kept(nodes):
    here, there = nodes
    name, (span, *_) = offer_spans(here, there)
    ref = decode_manifest(span.offer.manifest).refs[0]
    (path,) = here._config.data_dir.rglob(f"{ref.name}*")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    before = stored_bytes(there)
    with pytest.raises(FabricError):
        take_span(here, there, name, span)
    assert sweep(there) == before
    assert not there.node.moves.prefix_target.leases.refs
    assert turn(there, "dave").admitted.cached_tokens == 0


def erase(service, agent):
    now_s, name = service.node.resources.clock.wall_s(), f"erase-{next(_names):06d}"
    call(service, EraseAgent(TENANT, agent, 2, OperationId(name), now_s), EraseReceipt)


def share_erasure(service, agent):
    """Share the erasure's tombstone, as with a node that was away."""
    erased = tombstone(KEY, TENANT, agent, 2, service.node.resources.clock.wall_s())
    call(service, ShareErasures((erased,)), KnownErasures)


@pytest.mark.parametrize("erase_on", [erase, share_erasure])
def test_erasure_removes_lent_prefix_and_refuses_it_later(nodes, erase_on):
    here, there = nodes
    before = stored_bytes(there)
    name, spans = offer_spans(here, there)
    for span in spans:
        take_span(here, there, name, span)
    assert stored_bytes(there) > before
    erase_on(there, spans[0].agent)
    assert stored_bytes(there) == before
    with pytest.raises(FabricError) as caught:
        take_span(here, there, name, spans[0])
    assert caught.value.code == "erased"
    assert sweep(there) == before


def test_lease_of_lent_prefix_expires_unless_renewed(nodes, monkeypatch):
    here, there = nodes
    before, leases = stored_bytes(there), there.node.moves.prefix_target.leases
    lend(here, there)
    clock = leases._clock
    now_s = clock.monotonic_s() + SPAN_LEASE_S - 5
    monkeypatch.setattr(type(clock), "monotonic_s", lambda self: now_s)
    assert [copied.blocks_sent for copied in lend(here, there)[1]] == [0]
    now_s += 10
    on_loop(there, there.node.tiers.budget.enforce())
    assert leases.refs
    now_s += SPAN_LEASE_S
    on_loop(there, there.node.tiers.budget.enforce())
    assert not leases.refs
    assert stored_bytes(there) == before


async def drop_leases(node):
    assert node.moves.prefix_target.leases.release_all()
    node.resources.store.blocks.sweep()


def test_agent_keeps_blocks_of_a_released_lease(nodes):
    here, there = nodes
    lend(here, there)
    first = turn(there, "dave").admitted.cached_tokens
    on_loop(there, drop_leases(there.node))
    assert turn(there, "erin").admitted.cached_tokens >= first > 0


def test_lent_prefixes_are_evicted_before_agents(nodes, monkeypatch):
    here, there = nodes
    turn(there, "dave", system={"role": "system", "content": "none of the others says so. " * 40})
    lend(here, there)
    borrowed = sum(ref.payload_bytes for ref in there.node.moves.prefix_target.leases.refs)
    assert borrowed
    budget, leases = there.node.tiers.budget, there.node.moves.prefix_target.leases
    limit_bytes = stored_bytes(there) - borrowed // 2 + (1 << 20)
    monkeypatch.setattr(budget, "_disk", replace(budget._disk, limit_bytes=limit_bytes))
    on_loop(there, budget.enforce())
    assert leases.refs
    on_loop(there, budget.make_room(TENANT, 1 << 20))
    assert not leases.refs
    assert there.node.resources.table.get((TENANT, AgentId("dave"))) is not None


def test_node_refuses_prefixes_over_its_limit(model, tmp_path):
    with two_nodes(tmp_path, model, popular_bytes=1000) as (here, there):
        turn(here, "alice")
        turn(here, "bob")
        before = stored_bytes(there)
        with pytest.raises(FabricError) as caught:
            lend(here, there)
        assert caught.value.code == "no_room"
        assert stored_bytes(there) == before
        assert offer_spans(there, here)[1] == ()


def test_prefix_too_long_for_the_limit_is_lent_in_part(nodes):
    here, _ = nodes
    long = {"role": "system", "content": SYSTEM["content"] * 3}
    for agent in ("erin", "frank"):
        turn(here, agent, system=long)
    records = [
        here.node.resources.table.get((TENANT, AgentId(name))).saved for name in ("erin", "frank")
    ]
    block_bytes = records[0].pieces[0].block.payload_bytes

    def tokens(bytes_max):
        found = shared_prefixes(here.node.resources.store, records, bytes_max)
        return [span.record.tokens_count for span in found]

    assert tokens(1 << 30)[0] > BLOCK_TOKENS
    assert tokens(2 * block_bytes - 1) == [BLOCK_TOKENS]
    assert tokens(block_bytes - 1) == []


def test_encrypted_nodes_lend_prefixes(model, tmp_path):
    with (
        running(tmp_path, model, encrypt_at_rest=True) as here,
        running(tmp_path, model, "there", encrypt_at_rest=True) as there,
    ):
        turn(here, "alice")
        turn(here, "bob")
        assert lend(here, there)[1][0].blocks_sent
        assert turn(there, "dave").admitted.cached_tokens >= BLOCK_TOKENS


def test_restart_drops_lent_prefixes(model, tmp_path):
    with running(tmp_path, model) as here:
        turn(here, "alice")
        turn(here, "bob")
        with running(tmp_path, model, "there") as there:
            before = stored_bytes(there)
            lend(here, there)
            assert stored_bytes(there) > before
        with running(tmp_path, model, "there") as there:
            assert stored_bytes(there) == before
            assert lend(here, there)[1][0].blocks_sent


def test_returned_prefix_is_dropped_and_not_taken_again(nodes):
    here, there = nodes
    before = stored_bytes(there)
    name, spans = offer_spans(here, there)
    take_span(here, there, name, spans[0])
    assert stored_bytes(there) > before
    call(there, ReturnSpans(*spans[0].key), Done)
    assert stored_bytes(there) == before
    with pytest.raises(FabricError):  # offered before the return, and still in transit
        take_span(here, there, name, spans[0])
    assert sweep(there) == before
