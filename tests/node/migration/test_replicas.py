"""Forks and replicas between real nodes: the same bits, then independent agents."""

import asyncio
import itertools
import threading

import pytest

from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.node_calls import AgentList, Copied, CopyBlocks, Done, ListAgents, ReleaseAgent
from fabric.control.replica_calls import KeepFork, KeepReplica
from fabric.errors import FabricError
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.record.manifest import OwnerState
from fabric.turn.generation import CacheTier, Delta, GenerateRequest, Sampling
from node.migration.incoming import IncomingMoves
from tests.support.architectures import ARCHITECTURES
from tests.support.conversations import read_messages
from tests.support.copies import copied_offer, fork, replicate, withdraw
from tests.support.incoming import pinned_blocks
from tests.support.samples import sample
from tests.support.services import TENANT, ask, call, identity_of, running, start_service
from tests.support.small_node import on_loop
from tests.support.tiny_models import ONE_LAYER, write_model

_operations = itertools.count()
SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 30}
HELLO = [SYSTEM, {"role": "user", "content": "naïve café 東京"}]


def turn(service, messages, agent, epoch=1, **options):
    """Run a turn; return its tokens with log probabilities, and the reply."""
    options = {"max_tokens": 6, "logprobs": 1, "ignore_eos": True, **options}
    reply = ask(service, messages, agent=agent, epoch=epoch, **options)
    entries = [e for event in reply.events if isinstance(event, Delta) for e in event.logprobs]
    return [(e.token, e.logprob) for e in entries], reply


def continued(messages, reply, words):
    """Return the conversation with the reply and a next question."""
    return [
        *messages,
        {"role": "assistant", "content": reply.text},
        {"role": "user", "content": words},
    ]


def test_arriving_blocks_are_registered_on_the_loop_only(model, tmp_path, monkeypatch):
    threads = set()
    note = IncomingMoves.add_block

    def record_thread(*arguments):
        threads.add(threading.current_thread().name)
        note(*arguments)

    monkeypatch.setattr(IncomingMoves, "add_block", record_thread)
    with running(tmp_path, model) as here, running(tmp_path, model, "there") as there:
        turn(here, HELLO, "alice")
        name, _, copied = copied_offer(here, there, "alice", 1)
        assert copied.blocks_sent == len(pinned_blocks(there.node)[name]) > 0
        withdraw(there, name, "alice")
        assert pinned_blocks(there.node) == {}
    assert threads == {"node"}


def erase(service, agent, tenant=TENANT, epoch=2):
    """Erase at the lowest possible epoch, so that tests can continue at the next one."""
    now_s, name = service.node.resources.clock.wall_s(), f"erase-it-{next(_operations)}"
    call_ = EraseAgent(tenant, AgentId(agent), epoch, OperationId(name), now_s)
    return call(service, call_, EraseReceipt)


def views(service):
    listed = call(service, ListAgents(), AgentList).agents
    return {item.view.agent: (item.view, item.sketch) for item in listed}


@pytest.mark.parametrize("name", sample(["llama", "gemma4_text", "qwen3_5"], "qwen3_5"))
def test_fork_answers_like_its_source_and_outlives_it(name, tmp_path):
    """Alice, a fork on her node and one elsewhere: equal bit for bit, then independent."""
    model = str(write_model(tmp_path / name, ARCHITECTURES[name]))
    with running(tmp_path, model, "here") as here, running(tmp_path, model, "there") as there:
        _, first = turn(here, HELLO, "alice")
        before = here.node.resources.store.blocks.total_bytes
        beside = fork(here, here, "alice", "beside")
        assert here.node.resources.store.blocks.total_bytes == before, "blocks are shared"
        fork(here, there, "alice", "afar")
        assert (beside.node, beside.epoch, beside.state) == ("here", 1, OwnerState.OWNED)
        second = continued(HELLO, first, "größer")
        # In this order, so that no turn finds blocks of another agent's later turn.
        got, besides = turn(here, second, "beside")
        want, stayed = turn(here, second, "alice")
        assert got == want
        got, afar = turn(there, second, "afar")
        assert got == want
        tiers = [reply.admitted.cache for reply in (besides, stayed, afar)]
        assert tiers == [CacheTier.DISK, CacheTier.HOT, CacheTier.PEER]
        assert len({reply.admitted.cached_tokens for reply in (besides, stayed, afar)}) == 1
        third = continued(second, stayed, "the dog")
        want, _ = turn(here, third, "alice")
        turn(here, continued(second, stayed, "the log and the mat"), "beside")
        assert erase(here, "alice").existed
        assert turn(there, third, "afar")[0] == want, "the source agent is erased"
        again = continued(second, stayed, "the log and the mat")
        assert turn(here, again, "beside")[1].admitted.cached_tokens > 100
        for service in (here, there):
            assert service.node.resources.store.blocks.check_integrity() == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", ONE_LAYER))


@pytest.fixture(scope="module")
def nodes(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    with running(folder, model, "here") as here, running(folder, model, "there") as there:
        yield here, there


async def remove_agents(node):
    """Drop all agents without tombstones: the next test starts at epoch 1 again."""
    for agent in node.resources.table:
        if agent.saved is not None:
            node.resources.store.evict([agent.saved])
        node.resources.table.forget(agent)


@pytest.fixture
def pair(nodes):
    yield nodes
    for service in nodes:
        on_loop(service, remove_agents(service.node))
        assert service.node.resources.store.blocks.total_bytes == 0, "nothing is left of any copy"


def code_of(work):
    with pytest.raises(FabricError) as caught:
        work()
    return int(caught.value.status), caught.value.code


def test_fork_is_refused_if_name_epoch_or_blocks_do_not_fit(pair):
    here, there = pair
    turn(here, HELLO, "alice")
    fork(here, here, "alice", "bob")
    fork(here, here, "alice", "bob")  # the same operation again
    manifest = copied_offer(here, here, "alice", 1)[1].manifest

    def keep(service, name, epoch=1):
        name_ = AgentId(name)
        operation = OperationId("operation-9")
        keep_call = KeepFork("copy-other", manifest, operation, name_, epoch)
        return lambda: call(service, keep_call, object)

    assert code_of(lambda: fork(here, here, "alice", "bob", operation="operation-2")) == (
        409,
        "agent_exists",
    )
    assert code_of(keep(here, "alice")) == (409, "agent_exists")
    assert code_of(keep(there, "carol")) == (409, "blocks_missing")
    assert "carol" not in views(there), "a failed fork leaves nothing"
    assert code_of(lambda: copied_offer(here, here, "alice", 7)) == (421, "stale_epoch")
    assert code_of(lambda: copied_offer(here, here, "nobody", 1)) == (404, "agent_not_found")
    assert there.node.resources.store.blocks.check_integrity() == []


def test_repeated_fork_call_does_not_undo_an_erasure(pair):
    here, _ = pair
    turn(here, HELLO, "alice")
    fork(here, here, "alice", "dave")
    erase(here, "dave", epoch=1_001)

    assert code_of(lambda: fork(here, here, "alice", "dave")) == (421, "erased")
    assert "dave" not in views(here)


def test_unused_fork_is_found_by_its_own_id_only(pair):
    here, _ = pair
    prompt = "the cat sat on the mat and the dog sat on the log " * 30
    first = ask(here, prompt, max_tokens=4)
    fork(here, here, first.admitted.agent, "0-before-auto")
    assert views(here)["0-before-auto"][1] == (), "no router gets its sketch"
    again = ask(here, prompt + first.text + " more", max_tokens=4)

    assert again.admitted.agent == first.admitted.agent


def test_fork_during_a_turn_copies_the_last_saved_record(pair):
    here, _ = pair
    _, first = turn(here, HELLO, "alice")
    turn(here, HELLO, "control")
    second = continued(HELLO, first, "größer")
    started, go_on = threading.Event(), asyncio.Event()

    async def serve_slowly():
        request = GenerateRequest(
            OperationId("slow-turn-1"),
            TENANT,
            identity_of("alice"),
            Sampling(max_tokens=400, ignore_eos=True),
            messages=read_messages(second),
            epoch=1,
        )
        async for event in here.node.turns.serve(request):
            if isinstance(event, Delta):
                started.set()
                await go_on.wait()

    running_turn = asyncio.run_coroutine_threadsafe(serve_slowly(), here._loop)
    assert started.wait(60)
    try:
        assert views(here)["alice"][0].busy
        fork(here, here, "alice", "bob")
        other = continued(HELLO, first, "the dog")
        assert turn(here, other, "bob")[0] == turn(here, other, "control")[0]
        assert views(here)["alice"][0].busy
    finally:
        here._loop.call_soon_threadsafe(go_on.set)
        running_turn.result(60)


def test_replica_takes_over_from_a_lost_owner(pair):
    here, there = pair
    _, first = turn(here, HELLO, "alice")
    view, copied = replicate(here, there, "alice")
    assert (view.state, view.epoch, view.revision, view.node) == ("replica", 1, 1, "here")
    assert view.kept
    assert view.tail == views(here)["alice"][0].tail != ""
    assert copied.blocks_sent == view.blocks > 1
    second = continued(HELLO, first, "größer")
    want, stayed = turn(here, second, "alice")
    refreshed, copied = replicate(here, there, "alice")
    assert refreshed.tail == views(here)["alice"][0].tail != view.tail
    assert copied.blocks_sent < refreshed.blocks, "only new blocks are sent"
    assert replicate(here, there, "alice")[1].blocks_sent == 0
    assert code_of(lambda: turn(there, second, "alice", epoch=1)) == (421, "not_owner")
    third = continued(second, stayed, "the dog")
    want = turn(here, third, "alice")[0]  # the replica is stale by one turn now

    got, taken_over = turn(there, third, "alice", epoch=3)
    assert got == want
    assert taken_over.admitted.cached_tokens > 200
    assert taken_over.admitted.cache is CacheTier.PEER
    assert not views(there)["alice"][0].kept
    assert code_of(lambda: replicate(here, there, "alice")) == (409, "not_a_replica")
    # The lost owner returns with more turns than its successor's record has.
    turn(here, third, "alice")
    here_to = ReleaseAgent(TENANT, AgentId("alice"), 3, "move-it-now", NodeName("there"))
    call(here, here_to, Done)
    stale_view = views(here)["alice"][0]
    assert (stale_view.state, stale_view.epoch) == ("replica", 3)
    assert stale_view.revision > views(there)["alice"][0].revision
    assert replicate(there, here, "alice", epoch=3)[0].tail == views(there)["alice"][0].tail


def test_stale_and_aborted_copies_are_refused(pair):
    here, there = pair
    _, first = turn(here, HELLO, "alice")
    name, old, _ = copied_offer(here, there, "alice", 1)
    turn(here, continued(HELLO, first, "größer"), "alice")
    replicate(here, there, "alice", kept=False)

    def keep(migration, offer):
        keep_call = KeepReplica(migration, offer.manifest, NodeName("here"))
        return lambda: call(there, keep_call, object)

    assert code_of(keep(name, old)) == (409, "stale_copy")
    withdraw(there, name, "alice")
    assert pinned_blocks(there.node) == {}
    erase(there, "alice")
    assert code_of(keep(name, old)) == (409, "aborted")
    assert views(there) == {}
    blocks = CopyBlocks(name, NodeName("here"), old)
    withdraw(here, name, "alice")
    assert code_of(lambda: call(there, blocks, Copied))[1] == "bad_ticket"
    assert pinned_blocks(there.node) == {}
    assert there.node.resources.store.blocks.total_bytes == 0


def test_replica_survives_restart_and_is_removed_by_erasure(model, tmp_path):
    with running(tmp_path, model, "here") as here:
        _, first = turn(here, HELLO, "alice")
        there = start_service(tmp_path, model, "there")
        replicate(here, there, "alice")
        there.stop()
        with running(tmp_path, model, "there") as there:
            view = views(there)["alice"][0]
            assert (view.state, view.epoch, view.kept) == ("replica", 1, True)
            assert erase(there, "alice", TenantId("other")).existed is False
            second = continued(HELLO, first, "größer")
            assert turn(there, second, "alice", epoch=2)[1].admitted.cached_tokens > 100
            assert erase(there, "alice").blocks_kept_shared == 0
            assert there.node.resources.store.blocks.total_bytes == 0


def test_replica_evicts_no_owned_agent(model, tmp_path):
    def messages_of(name, times=45):
        return [{"role": "user", "content": f"{name} the cat sat on the mat. " * times}]

    with running(tmp_path, model, "here") as here:
        turn(here, messages_of("alice"), "alice")
        size = here.node.resources.store.blocks.total_bytes
        with running(tmp_path, model, "there", disk_bytes=int(3.6 * size)) as there:
            for name in ("first", "other"):
                turn(there, messages_of(name), name)
            replicate(here, there, "alice", background=True)
            turn(here, messages_of("bella"), "bella")
            replicate(here, there, "bella", background=True)
            assert views(there).keys() == {"first", "other", "bella"}, "a replica evicts another"
            turn(here, messages_of("large", times=120), "large")
            refused = code_of(lambda: copied_offer(here, there, "large", 1, background=True))
            assert refused[1] == "disk_budget"
            assert views(there).keys() >= {"first", "other"}
            assert there.node.resources.store.blocks.check_integrity() == []


def test_agent_of_an_undecided_move_is_not_evicted_for_a_replica(model, tmp_path):
    """Its record names its own node: no other node is known to have the agent."""

    def messages_of(name):
        return [{"role": "user", "content": f"{name} the cat sat on the mat. " * 45}]

    def release(service, epoch, owner):
        move = ReleaseAgent(TENANT, AgentId("other"), epoch, "move-it-now", NodeName(owner))
        call(service, move, Done)

    with running(tmp_path, model, "here") as here:
        turn(here, messages_of("alice"), "alice")
        size = here.node.resources.store.blocks.total_bytes
        with running(tmp_path, model, "there", disk_bytes=int(2.6 * size)) as there:
            for name in ("first", "other"):
                turn(there, messages_of(name), name)
            release(there, 2, "there")
            assert views(there)["other"][0].state == "replica"
            refused = code_of(lambda: replicate(here, there, "alice", background=True))
            assert refused[1] == "disk_budget"
            assert views(there).keys() == {"first", "other"}
            release(there, 3, "here")
            replicate(here, there, "alice", background=True)
            assert views(there).keys() == {"first", "alice"}
