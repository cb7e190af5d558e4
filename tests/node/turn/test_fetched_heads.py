"""Heads of prompts that a waiting turn fetches from a node that has or computes them."""

import asyncio
import itertools
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.directive_calls import ChangeSettings
from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.head_calls import HeadOffer, OfferHead
from fabric.control.node_calls import AgentView, Done
from fabric.control.span_calls import ReturnSpans
from fabric.edit_mode import EditMode
from fabric.errors import FabricError
from fabric.ids import AgentId, BlockHash, MigrationId, NodeName, OperationId, TenantId, TurnId
from fabric.turn.generation import CacheTier, HeadLoan, Sampling, TurnTag
from node.engine import heads
from node.net.link_table import LinkTable
from node.store.block_store import BlockStore
from node.tiers.disk_budget import DiskBudget
from node.transfer import peer_calls
from node.turn import fetched_heads
from node.turn.fetched_heads import FetchedHeads
from tests.support.agent_traffic import words
from tests.support.architectures import ARCHITECTURES
from tests.support.incoming import pinned_blocks
from tests.support.logged_turns import logged_turns
from tests.support.services import TENANT, ask, call, running
from tests.support.shared_heads import HEAD, Counted, chat, request_of, serve_turn, together
from tests.support.small_node import on_loop
from tests.support.tiny_models import ONE_LAYER, write_model

OTHER = TenantId("other")
REQUIRE_SOONER = FetchedHeads._require_sooner
_names = itertools.count()


@contextmanager
def two_nodes(folder, model, **settings):
    with (
        running(folder, model, "here", **settings) as here,
        running(folder, model, "there", **settings) as there,
    ):
        yield here, there


def key(number):
    return TENANT, AgentId(f"agent-{number}")


def erasure(agent):
    name = OperationId(f"erase-{next(_names):06d}")
    return EraseAgent(TENANT, AgentId(agent), 9, name, 1.0)


def erase(service, agent):
    return call(service, erasure(agent), EraseReceipt)


async def sweep(node):
    node.tiers.leases.release_all()
    node.resources.store.blocks.sweep()


def clear_node(service):
    """Erase all agents and leases of a node."""
    for agent in [agent for _, agent in service.node.resources.table._agents]:
        erase(service, agent)
    on_loop(service, sweep(service.node))


@pytest.fixture(autouse=True)
def _lift_time_limits(monkeypatch):
    """Remove the time limits of waiting turns, as this machine may be busy."""
    monkeypatch.setattr(heads, "HEAD_WAIT_FACTOR", 1e6)
    monkeypatch.setattr(fetched_heads, "HEAD_FETCH_EXTRA_S", 60.0)
    monkeypatch.setattr(FetchedHeads, "_require_sooner", lambda *_: None)
    monkeypatch.setattr(fetched_heads, "HEAD_GRACE_POLLS", 60)
    for name in ("HEAD_REPLY_S", "HEAD_CONNECT_S"):
        monkeypatch.setattr(peer_calls, name, 60.0)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), ONE_LAYER))


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    with two_nodes(folder, model) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def cold_texts(tmp_path_factory, model):
    """Return the texts of requests 0 to 7, each computed cold."""
    with running(tmp_path_factory.mktemp("calm"), model) as service:
        return [
            together(service, [request_of(number, is_private=True)])[0].text for number in range(8)
        ]


def loan_of(service, *, is_coming=False):
    node = service.node
    return HeadLoan(node.name, node.resources.transfers.addresses(), is_coming)


def with_loan(request, source, **options):
    return replace(request, head=loan_of(source, **options))


def test_stored_head_is_fetched(pair, counted, cold_texts):
    here, there = pair
    (first,) = together(here, [request_of(0)])
    before = counted.of(there)
    (reply,) = together(there, [with_loan(request_of(1), here)])
    assert reply.text == cold_texts[1]
    assert reply.admitted.cache is CacheTier.PEER
    head = reply.admitted.fetched_tokens
    assert head > first.admitted.prompt_tokens // 2
    assert counted.of(there) - before == reply.admitted.prompt_tokens - 1 - head
    assert pinned_blocks(there.node) == {}


def test_lender_logs_the_turn_that_borrows(model, tmp_path):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        tag = TurnTag(TurnId("turn-that-borrows"), 0.0)
        with logged_turns("node") as lines:
            (reply,) = together(there, [replace(with_loan(request_of(1), here), turn=tag)])
        assert reply.admitted.cache is CacheTier.PEER
        named = {turn for message, turn in lines if ": lends the first" in message}
        assert named == {tag.id}


def test_refused_transfer_names_the_turn_of_its_ticket(model, tmp_path, monkeypatch):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])

        def lose(store, ref):
            raise FileNotFoundError

        monkeypatch.setattr(BlockStore, "open_payload", lose)
        tag = TurnTag(TurnId("turn-that-borrows"), 0.0)
        with logged_turns("node.transfer") as lines:
            together(there, [replace(with_loan(request_of(1), here), turn=tag)])
        assert {turn for message, turn in lines if "no longer here" in message} == {tag.id}


def serve_at_once(*pairs):
    """Serve requests on nodes at once; return replies or exceptions."""
    tasks = [asyncio.run_coroutine_threadsafe(serve_turn(s, r), s._loop) for s, r in pairs]
    return [task.result(300) for task in tasks]


def bytes_sent(service):
    return service.node.resources.transfers.counts().get("bytes", 0)


def blocks_fetched(service):
    return service.node.connections.counts().get("blocks", 0)


def test_concurrent_turns_share_one_fetch(model, tmp_path, counted, cold_texts):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        counted.reset()
        replies = together(there, [with_loan(request_of(number), here) for number in range(1, 8)])
        assert [reply.text for reply in replies] == cold_texts[1:]
        head = max(reply.admitted.fetched_tokens for reply in replies)
        tails = sum(reply.admitted.prompt_tokens - head for reply in replies)
        assert counted.of(there) <= tails
        blocks = there.node.resources.table.get(key(1)).saved.pieces.blocks[: head // 256]
        assert blocks_fetched(there) == len(blocks)
        assert (
            0 < bytes_sent(here) <= sum(ref.payload_bytes for ref in blocks)
        )  # fewer if compressed


@pytest.mark.parametrize("is_coming", [False, True])
def test_head_in_progress_is_computed_once(model, tmp_path, counted, cold_texts, is_coming):
    """The head's blocks are fetched as they are published."""
    with two_nodes(tmp_path, model) as (here, there):
        counted.reset()
        if is_coming:
            lead, *others = serve_at_once(
                (here, request_of(0)),
                *((there, with_loan(request_of(n), here, is_coming=True)) for n in (1, 2, 3)),
            )
        else:
            began = threading.Event()
            counted.when(1, lambda _: began.set())
            first = asyncio.run_coroutine_threadsafe(serve_turn(here, request_of(0)), here._loop)
            assert began.wait(60)
            others = serve_at_once(*((there, with_loan(request_of(n), here)) for n in (1, 2, 3)))
            lead = first.result(300)
        replies = [lead, *others]
        assert [reply.text for reply in replies] == cold_texts[:4]
        head = max(reply.admitted.fetched_tokens or 0 for reply in others)
        assert head > lead.admitted.prompt_tokens // 2
        tails = sum(reply.admitted.prompt_tokens - head for reply in replies)
        assert counted.tokens <= 1.1 * head + tails
        assert blocks_fetched(there) == head // 256
        assert pinned_blocks(there.node) == {}


def test_lender_whose_turn_arrives_late_is_awaited(model, tmp_path, cold_texts):
    with two_nodes(tmp_path, model) as (here, there):
        answered, answer = threading.Event(), here.node.resources.transfers.answer_call

        def record_reply(*words):
            reply = answer(*words)
            answered.set()
            return reply

        here.node.resources.transfers.answer_call = record_reply
        asking = serve_turn(there, with_loan(request_of(1), here, is_coming=True))
        waiting = asyncio.run_coroutine_threadsafe(asking, there._loop)
        assert answered.wait(60)
        together(here, [request_of(0)])
        reply = waiting.result(300)
        assert reply.text == cold_texts[1]
        assert reply.admitted.fetched_tokens


def test_head_arrives_before_its_lender_has_answered(model, tmp_path, cold_texts):
    long = Sampling(max_tokens=20_000, ignore_eos=True)
    with two_nodes(tmp_path, model) as (here, there):
        began = threading.Event()
        slow = serve_turn(here, replace(request_of(0), sampling=long), lambda _: began.set())
        first = asyncio.run_coroutine_threadsafe(slow, here._loop)
        assert began.wait(60)
        (reply,) = together(there, [with_loan(request_of(1), here)])
        assert not first.done()
        assert reply.text == cold_texts[1]
        assert reply.admitted.fetched_tokens
        first.cancel()


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_windows_and_recurrent_states_are_fetched(tmp_path, name):
    model = str(write_model(tmp_path / "model", ARCHITECTURES[name]))
    requests = [request_of(number, messages=chat(number, words(1, 300))) for number in range(3)]
    with running(tmp_path / "calm", model) as service:
        cold_texts = [together(service, [replace(r, is_private=True)])[0].text for r in requests]
    with two_nodes(tmp_path, model) as (here, there):
        first = [(here, requests[0])]
        replies = serve_at_once(
            *first, *((there, with_loan(r, here, is_coming=True)) for r in requests[1:])
        )
        assert [reply.text for reply in replies] == cold_texts
        assert all(reply.admitted.fetched_tokens for reply in replies[1:])


# --- what ends a wait ------------------------------------------------------------------------


def test_slow_link_leads_to_recomputation(pair, cold_texts, monkeypatch):
    monkeypatch.setattr(FetchedHeads, "_require_sooner", REQUIRE_SOONER)
    here, there = pair
    together(here, [request_of(0)])
    rank = LinkTable.rank
    monkeypatch.setattr(LinkTable, "rank", lambda *a: [(address, 10.0) for address, _ in rank(*a)])
    before = blocks_fetched(there)
    clear_node(there)
    (reply,) = together(there, [with_loan(request_of(2), here)])
    assert reply.text == cold_texts[2]
    assert reply.admitted.fetched_tokens is None
    assert blocks_fetched(there) == before


def test_lender_killed_during_transfer_costs_no_answer(model, tmp_path, cold_texts, monkeypatch):
    """The blocks that have arrived are used, and the rest is computed."""
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        adopt, count = BlockStore.adopt, itertools.count()

        def stop_lender_at_fourth(store, *words):
            if next(count) == 4:
                here.node.resources.transfers.stop()
            adopt(store, *words)

        monkeypatch.setattr(BlockStore, "adopt", stop_lender_at_fourth)
        (reply,) = together(there, [with_loan(request_of(1), here)])
        assert reply.text == cold_texts[1]
        assert pinned_blocks(there.node) == {}
        assert not there.node.turns.fetched._fetches


def test_silent_or_stopped_lender_costs_no_answer(model, tmp_path, cold_texts, monkeypatch):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        silent = threading.Event()
        monkeypatch.setattr(peer_calls, "HEAD_REPLY_S", 0.5)
        monkeypatch.setattr(
            here.node.resources.transfers, "answer_call", lambda *_: silent.wait(60) and b""
        )
        (reply,) = together(there, [with_loan(request_of(1), here)])
        silent.set()
        assert (reply.text, reply.admitted.fetched_tokens) == (cold_texts[1], None)
        here.node.resources.transfers.stop()
        request = with_loan(request_of(2, messages=chat(2, words(9, 400))), here)
        (reply,) = together(there, [request])
        assert reply.admitted.fetched_tokens is None


def test_disconnected_client_ends_its_fetch(model, tmp_path, monkeypatch):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        requested, may_answer = threading.Event(), threading.Event()
        answer = here.node.resources.transfers.answer_call

        def answer_late(*words):
            requested.set()
            may_answer.wait(60)
            return answer(*words)

        here.node.resources.transfers.answer_call = answer_late

        async def leave():
            task = asyncio.create_task(serve_turn(there, with_loan(request_of(1), here)))
            await asyncio.to_thread(requested.wait, 60)
            (turn,) = there.node.live_turns
            turn.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(leave(), there._loop).result(60)
        may_answer.set()
        on_loop(there, wait_for_fetches(there.node.turns.fetched))
        assert blocks_fetched(there) == 0
        assert pinned_blocks(there.node) == {}


async def wait_for_fetches(fetched):
    while fetched._tasks:
        await asyncio.wait(fetched._tasks)


def test_damaged_block_is_not_used(model, tmp_path, cold_texts):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        ref = here.node.resources.table.get(key(0)).saved.pieces[3].block
        (path,) = here._config.data_dir.rglob(f"{ref.name}*")
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(bytes(raw))
        (reply,) = together(there, [with_loan(request_of(1), here)])
        assert reply.text == cold_texts[1]
        assert (reply.admitted.fetched_tokens or 0) <= 3 * 256


# --- what is lent ----------------------------------------------------------------------------


def test_other_tenants_get_no_head(pair, cold_texts):
    here, there = pair
    together(here, [request_of(0)])
    other = request_of(3, tenant=OTHER)
    (reply,) = together(there, [with_loan(other, here)])
    assert (reply.text, reply.admitted.cached_tokens) == (cold_texts[3], 0)


@pytest.mark.parametrize("kind", ["private", "erased"])
def test_private_and_erased_agents_lend_nothing(model, tmp_path, cold_texts, kind):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        if kind == "private":
            call(here, ChangeSettings(TENANT, AgentId("agent-0"), is_private=True), AgentView)
        else:
            erase(here, "agent-0")
        (reply,) = together(there, [with_loan(request_of(1), here)])
        assert reply.text == cold_texts[1]
        assert reply.admitted.fetched_tokens is None
        assert blocks_fetched(there) == 0


def test_edited_memory_is_not_lent(model, tmp_path):
    def conversation(first):
        texts = [first, "Well.", HEAD]
        roles = ["user", "assistant", "user"]
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        return [{"role": "system", "content": words(1, 10)}, *messages]

    with two_nodes(tmp_path, model) as (here, there):
        ask(here, conversation(words(3, 60)), agent="agent-0", epoch=1)
        cleared = conversation("[cleared]")
        edited = ask(here, cleared, agent="agent-0", epoch=1, edits=EditMode.AMORTIZE)
        assert edited.admitted.amortized_tokens > 1_000
        (reply,) = together(there, [with_loan(request_of(1, messages=cleared), here)])
        assert reply.admitted.cached_tokens == 0
        assert blocks_fetched(there) == 0


def test_running_private_turn_lends_nothing(model, tmp_path, cold_texts, monkeypatch):
    monkeypatch.setattr(fetched_heads, "HEAD_GRACE_POLLS", 0)
    with two_nodes(tmp_path, model) as (here, there):
        private = request_of(0, is_private=True)
        replies = serve_at_once(
            (here, private), (there, with_loan(request_of(1), here, is_coming=True))
        )
        assert [reply.text for reply in replies] == cold_texts[:2]
        assert blocks_fetched(there) == 0


@pytest.mark.parametrize("when", ["before", "offered", "meanwhile", "after"])
def test_erased_lender_leaves_nothing(model, tmp_path, cold_texts, monkeypatch, when):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        before = there.node.resources.store.blocks.total_bytes
        if when == "before":
            erase(there, "agent-0")
        elif when == "offered":
            make_room, begun = DiskBudget.make_room, []

            async def erase_first(budget, *words, **options):
                if not begun and budget is there.node.tiers.budget:
                    begun.append(True)
                    await there.node.commands.erasing.erase(erasure("agent-0"))
                await make_room(budget, *words, **options)

            monkeypatch.setattr(DiskBudget, "make_room", erase_first)
        elif when == "meanwhile":
            adopt, once = BlockStore.adopt, []

            def erase_after_adopt(store, *words):
                adopt(store, *words)
                if not once:
                    once.append(there.control(encode_call(erasure("agent-0"))))

            monkeypatch.setattr(BlockStore, "adopt", erase_after_adopt)
        (reply,) = together(there, [with_loan(request_of(1), here)])
        assert reply.text == cold_texts[1]
        if when == "after":
            assert reply.admitted.fetched_tokens
            erase(there, "agent-0")
        else:
            assert reply.admitted.fetched_tokens is None
        leases = there.node.tiers.leases
        assert not leases.refs
        assert pinned_blocks(there.node) == {}
        erase(there, "agent-1")
        on_loop(there, sweep(there.node))
        assert there.node.resources.store.blocks.total_bytes == before


def test_agent_made_private_takes_its_head_back(model, tmp_path):
    with two_nodes(tmp_path, model) as (here, there):
        together(here, [request_of(0)])
        together(there, [with_loan(request_of(1), here)])
        leases = there.node.tiers.leases
        assert leases.refs
        call(there, ReturnSpans(TENANT, AgentId("agent-0")), Done)
        assert not leases.refs


def test_fetched_head_is_lent_on_in_its_lenders_name(model, tmp_path, cold_texts):
    with two_nodes(tmp_path, model) as (here, there), running(tmp_path, model, "third") as third:
        together(here, [request_of(0)])
        together(there, [with_loan(request_of(1), here)])
        erase(there, "agent-1")
        (reply,) = together(third, [with_loan(request_of(2), there)])
        assert reply.text == cold_texts[2]
        assert reply.admitted.fetched_tokens
        assert {record.agent for record in third.node.tiers.leases.records} == {"agent-0"}


def test_nodes_request_heads_only_in_their_own_name(pair):
    here, there = pair
    names = (BlockHash(b"n" * 32),)
    message = OfferHead(MigrationId("head-1"), NodeName("else"), TENANT, names, 0, 0.0)
    with pytest.raises(FabricError):
        call(here, message, HeadOffer)
    asking = there.node.turns.fetched._ask(
        here.node.name, loan_of(here).addresses, encode_call(message), 0.0
    )
    reply = decode_reply(HeadOffer, on_loop(there, asking))
    assert isinstance(reply, ErrorReply)
    assert reply.status == 401
