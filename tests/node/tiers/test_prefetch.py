"""Agents loaded ahead of their turns, and a node that takes no new ones."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabric.control.node_calls import (
    AgentList,
    AgentView,
    Describe,
    Done,
    DrainNode,
    Flush,
    ListAgents,
    NodeView,
    PrefetchAgent,
)
from fabric.errors import FabricError
from fabric.ids import AgentId
from fabric.turn.generation import CacheTier, Delta
from tests.support.architectures import ARCHITECTURES
from tests.support.samples import sample
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import ONE_LAYER, write_model

SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 30}
HELLO = [SYSTEM, {"role": "user", "content": "naïve café 東京"}]


def turn(service, messages, agent):
    reply = ask(service, messages, agent=agent, epoch=1, max_tokens=6, logprobs=1, ignore_eos=True)
    entries = [e for event in reply.events if isinstance(event, Delta) for e in event.logprobs]
    return [(e.token, e.logprob) for e in entries], reply


def continued(reply):
    answer = {"role": "assistant", "content": reply.text}
    return [*HELLO, answer, {"role": "user", "content": "größer"}]


def prefetch(service, agent, *, epoch=1, cancel=False):
    return call(service, PrefetchAgent(TENANT, AgentId(agent), epoch, cancel), AgentView)


def drop_hot_caches(service):
    call(service, Flush(drop_hot=True), Done)


def code_of(work):
    with pytest.raises(FabricError) as caught:
        work()
    return int(caught.value.status), caught.value.code


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", ONE_LAYER))


@pytest.fixture(scope="module")
def service(model, tmp_path_factory):
    with running(tmp_path_factory.mktemp("node"), model) as node_service:
        yield node_service


@pytest.mark.parametrize("name", sample(["gemma4_text", "qwen3_5"], "gemma4_text"))
def test_prefetched_agent_is_hot_and_answers_bit_for_bit(name, tmp_path):
    model = str(write_model(tmp_path / name, ARCHITECTURES[name]))
    with running(tmp_path, model) as service:
        check_bits(service)


def check_bits(service):
    _, first = turn(service, HELLO, "stays")
    turn(service, HELLO, "fetched")
    want, stayed = turn(service, continued(first), "stays")
    drop_hot_caches(service)
    view = prefetch(service, "fetched")
    assert view.tiers == ("hot", "disk")
    assert view.bytes.hot > 0
    got, fetched = turn(service, continued(first), "fetched")
    assert got == want
    assert fetched.admitted.cache is CacheTier.HOT
    assert fetched.admitted.cached_tokens == stayed.admitted.cached_tokens


def test_prefetch_is_idempotent(service):
    check_bits(service)
    turn(service, HELLO, "alice")
    assert "hot" in prefetch(service, "alice").tiers
    drop_hot_caches(service)
    with ThreadPoolExecutor(4) as pool:
        tiers = list(pool.map(lambda _: prefetch(service, "alice").tiers, range(4)))
    assert set(tiers) == {("hot", "disk")}
    assert code_of(lambda: prefetch(service, "alice", epoch=4)) == (421, "stale_epoch")
    assert code_of(lambda: prefetch(service, "nobody")) == (404, "agent_not_found")


@pytest.mark.parametrize("loads", [prefetch, lambda service, _: turn(service, HELLO, "alice")])
def test_restores_show_the_speed_of_the_disk(model, tmp_path, monkeypatch, loads):
    with running(tmp_path, model) as service:
        turn(service, HELLO, "alice")
        assert call(service, Describe(), NodeView).restore_bytes_per_s is None
        drop_hot_caches(service)
        monkeypatch.setattr("node.tiers.restore.RESTORE_MEASURED_BYTES_MIN", 1)

        loads(service, "alice")

        assert call(service, Describe(), NodeView).restore_bytes_per_s > 0


def test_short_restore_shows_no_speed(model, tmp_path):
    with running(tmp_path, model) as service:
        turn(service, HELLO, "alice")
        drop_hot_caches(service)
        prefetch(service, "alice")

        assert call(service, Describe(), NodeView).restore_bytes_per_s is None


class LoadGate:
    """A gate that blocks every load of a node at its first block."""

    def __init__(self, service, monkeypatch):
        self.begun, self.go_on = threading.Event(), threading.Event()
        load = service.node.resources.store.blocks.load_into

        def load_slowly(*arguments, **options):
            self.begun.set()
            assert self.go_on.wait(60)
            return load(*arguments, **options)

        monkeypatch.setattr(service.node.resources.store.blocks, "load_into", load_slowly)


def test_turn_joins_a_running_prefetch(service, monkeypatch):
    _, first = turn(service, HELLO, "carol")
    drop_hot_caches(service)
    gate = LoadGate(service, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        fetching = pool.submit(prefetch, service, "carol")
        assert gate.begun.wait(60)
        asking = pool.submit(turn, service, continued(first), "carol")
        listed = call(service, ListAgents(), AgentList).agents
        assert "hot" not in {i.view.agent: i.view for i in listed}["carol"].tiers
        gate.go_on.set()
        assert asking.result(60)[1].admitted.cache is CacheTier.HOT
        fetching.result(60)


def test_cancelled_prefetch_leaves_the_agent_on_disk(service, monkeypatch):
    _, first = turn(service, HELLO, "dora")
    drop_hot_caches(service)
    gate = LoadGate(service, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        fetching = pool.submit(code_of, lambda: prefetch(service, "dora"))
        assert gate.begun.wait(60)
        cancelling = pool.submit(prefetch, service, "dora", cancel=True)
        agent = service.node.resources.table.get((TENANT, "dora"))
        assert agent.loading.cancel.wait(60)
        gate.go_on.set()
        assert cancelling.result(60).tiers == ("disk",)
        assert fetching.result(60) == (409, "cancelled")
    assert service.node.resources.engine.budget.reserved_bytes == 0
    assert turn(service, continued(first), "dora")[1].admitted.cache is CacheTier.DISK


def test_prefetches_are_bounded_in_number_and_memory(model, tmp_path, monkeypatch):
    with running(tmp_path, model) as service:
        names = ["a", "b", "c"]
        for name in names:
            turn(service, HELLO, name)
        drop_hot_caches(service)
        gate = LoadGate(service, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            two = [pool.submit(prefetch, service, name) for name in names[:2]]
            loads = service.node.tiers.prefetches._loadings
            assert gate.begun.wait(60)
            while len(loads) < 2:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), service._loop).result(60)
            assert code_of(lambda: prefetch(service, "c")) == (429, "overloaded")
            gate.go_on.set()
            assert all("hot" in each.result(60).tiers for each in two)
        drop_hot_caches(service)
        budget = service.node.resources.engine.budget
        monkeypatch.setattr(budget, "_reserved_bytes", budget.total_bytes)  # all of it at work
        assert code_of(lambda: prefetch(service, "c")) == (503, "no_room")


def test_draining_node_refuses_new_agents_also_after_restart(model, tmp_path):
    with running(tmp_path, model) as service:
        turn(service, HELLO, "alice")
        call(service, DrainNode(draining=True), Done)
        call(service, DrainNode(draining=True), Done)
        assert service.node.view().state == "draining"
        assert turn(service, HELLO, "alice")[1].admitted.cached_tokens > 100
        assert code_of(lambda: turn(service, HELLO, "bob")) == (421, "draining")
    with running(tmp_path, model) as service:
        assert service.node.background.self_tests.found.passed, (
            "the self-test's agent is not refused as new"
        )
        assert service.node.view().state == "draining"
        assert code_of(lambda: turn(service, HELLO, "bob")) == (421, "draining")
        call(service, DrainNode(draining=False), Done)
        turn(service, HELLO, "bob")
    with running(tmp_path, model) as service:
        assert service.node.view().state == "ready"


def guess(service, agent):
    message = PrefetchAgent(TENANT, AgentId(agent), 1, is_guess=True)
    return call(service, message, AgentView)


def test_a_guess_is_refused_while_a_turn_waits(service, monkeypatch):
    _, _ = turn(service, HELLO, "gina")
    drop_hot_caches(service)
    engine = type(service.node.resources.engine)
    monkeypatch.setattr(engine, "unplaced_count", property(lambda _: 1))
    assert code_of(lambda: guess(service, "gina")) == (429, "turns_wait")
    assert "hot" in prefetch(service, "gina").tiers, "a requested prefetch is accepted"
    drop_hot_caches(service)
    monkeypatch.undo()
    assert "hot" in guess(service, "gina").tiers


def test_a_guess_gives_way_to_a_turn_that_lacks_memory(service, monkeypatch):
    _, _ = turn(service, HELLO, "hugo")
    drop_hot_caches(service)
    gate = LoadGate(service, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        guessing = pool.submit(code_of, lambda: guess(service, "hugo"))
        assert gate.begun.wait(60)
        hot = service.node.tiers.hot
        service._loop.call_soon_threadsafe(hot.make_room, 1 << 40)
        service.node.resources.engine.call(lambda: None).result()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), service._loop).result(60)
        gate.go_on.set()
        assert guessing.result(60) == (409, "cancelled")
    assert service.node.resources.engine.budget.reserved_bytes == 0
