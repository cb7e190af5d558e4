"""A whole node with a real tiny model: caches, tiers and owners."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.node_calls import AgentList, Done, Flush, ListAgents
from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId, TenantId
from fabric.turn.generation import CacheTier, MatchKind
from node.service import NodeService
from tests.support.services import ask, call, migrate, running
from tests.support.tiny_models import ONE_LAYER, write_model

SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 60}
BRIEF = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 20}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def user(text: str) -> dict[str, Any]:
    """Make a user message."""
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny llama's folder."""
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", ONE_LAYER, seed=4))


@pytest.fixture(scope="module")
def service(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeService]:
    """Run one node for the module."""
    with running(tmp_path_factory.mktemp("node"), model, tries_everything=True) as node_service:
        yield node_service


def test_self_test_restores_an_agent_and_cleans_up(service: NodeService) -> None:
    """The node tested its restore path at its start, and removed the test's data."""
    assert service.node.background.self_tests.found.passed, (
        service.node.background.self_tests.found.detail
    )
    assert not [a for a in service.node.resources.table if a.manifest.tenant == "_selftest"]


def test_prefill_speed_is_measured_before_the_first_turn(model: str, tmp_path: Path) -> None:
    """Turns are placed by speed; a node of unknown speed would get none, or all."""
    with running(tmp_path, model, tries_everything=True) as service:
        view = service.node.view()

    assert view.prefill_tokens_per_s > 0.0
    assert view.tokens == 0
    assert view.bytes.hot == 0


def test_next_turn_reuses_prompt_and_answer(service: NodeService) -> None:
    """A second turn reuses everything, the generated answer included."""
    messages = [SYSTEM, user("größer 東京?")]
    first = ask(service, messages, agent="extends")
    messages += [{"role": "assistant", "content": first.text}, user("and the dog?")]
    second = ask(service, messages, agent="extends")

    assert first.admitted.cache is CacheTier.COLD
    assert second.admitted.cache is CacheTier.HOT
    assert second.admitted.match is MatchKind.EXTEND
    assert second.admitted.cached_tokens == (
        first.admitted.prompt_tokens + first.finished.completion_tokens
    )


def test_exact_repeat_and_divergence_answer_like_a_cold_agent(service: NodeService) -> None:
    """Repeating or cutting a prompt gives the answer of a fresh agent."""
    base = [SYSTEM, user("the cat sat on the mat and the naïve café")]
    cut = [SYSTEM, user("the cat sat on the mat and the naï")]
    cold = {
        name: ask(service, m, agent=f"cold-{name}", tenant=TenantId(f"t-{name}")).text
        for name, m in (("base", base), ("cut", cut))
    }
    ask(service, base, agent="warm")
    exact = ask(service, base, agent="warm")
    diverged = ask(service, cut, agent="warm")

    assert exact.admitted.match is MatchKind.EXACT
    assert exact.admitted.cached_tokens == exact.admitted.prompt_tokens - 1
    assert cold["base"] == exact.text
    assert diverged.admitted.match is MatchKind.DIVERGE
    assert cold["cut"] == diverged.text


def test_two_agents_without_ids_share_a_prompt_and_stay_warm(model: str, tmp_path: Path) -> None:
    """A, B, A, B, A over one system prompt: always warm, stored once, also after a restart."""
    conversations: dict[str, list[Any]] = {
        "a": [SYSTEM, user("alpha")],
        "b": [SYSTEM, user("beta")],
    }
    seen: dict[str, set[str]] = {"a": set(), "b": set()}

    def turn(service: NodeService, name: str) -> Any:
        reply = ask(service, conversations[name])
        conversations[name] += [{"role": "assistant", "content": reply.text}, user("go on")]
        seen[name].add(reply.admitted.agent)
        return reply.admitted

    with running(tmp_path, model) as service:
        turn(service, "a")
        first_b = turn(service, "b")
        assert first_b.match is MatchKind.DIVERGE
        assert first_b.cached_tokens >= 256 * (first_b.prompt_tokens // 256 - 1)
        reason = f"begins with {first_b.cached_tokens} tokens of other conversations"
        assert first_b.match_reason == reason
        for name in "aba":
            again = turn(service, name)
            assert again.match is MatchKind.EXTEND
            assert again.cache is CacheTier.HOT
        records = [agent.saved for agent in service.node.resources.table]
        blocks = [{p.block.name for p in r.pieces if p.end == 256} for r in records if r]
        assert len(blocks) == 2
        assert len(blocks[0] & blocks[1]) >= 2
    with running(tmp_path, model) as service:
        for name in "ba":
            again = turn(service, name)
            assert again.match is MatchKind.EXTEND
            assert again.cache is CacheTier.DISK
    assert [len(seen["a"]), len(seen["b"])] == [1, 1]


def test_group_key_keeps_conversations_apart(service: NodeService) -> None:
    """Two conversations under one prompt_cache_key never overwrite each other."""
    one = ask(service, [user("the first conversation about cats")], group="team")
    two = ask(service, [user("a second one about dogs entirely")], group="team")
    follow = [
        user("the first conversation about cats"),
        {"role": "assistant", "content": one.text},
        user("more"),
    ]
    third = ask(service, follow, group="team")

    first, second = one.admitted.agent, two.admitted.agent
    assert first.startswith("team~")
    assert second.startswith("team~")
    assert third.admitted.agent == first != second
    assert third.admitted.match is MatchKind.EXTEND


def test_tenants_share_nothing(service: NodeService) -> None:
    """The same prompt of another tenant is cold."""
    ask(service, [SYSTEM, user("secret")], agent="x", tenant=TenantId("one"))
    other = ask(service, [SYSTEM, user("secret")], agent="x", tenant=TenantId("two"))
    by_content = ask(service, [SYSTEM, user("secret")], tenant=TenantId("three"))

    assert other.admitted.cache is CacheTier.COLD
    assert other.admitted.cached_tokens == 0
    assert by_content.admitted.cached_tokens == 0


def conversation(service_of: Any, agent: str, disturb: Any) -> list[str]:
    """Run three turns with tools and non-ASCII text, disturbing between them."""
    messages: list[Any] = [BRIEF, user("größer: 東京? " * 40)]
    answers = []
    for text in ("naïve café", '{"a": 1} the cat', None):
        reply = ask(service_of(), messages, agent=agent, tools=TOOLS, max_tokens=40)
        answers.append(reply.text)
        messages += [{"role": "assistant", "content": reply.text}]
        if text:
            messages += [{"role": "tool", "content": text}, user("the dog sat " * 30)]
        disturb()
    return answers


@pytest.fixture(scope="module")
def undisturbed(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Hold the conversation on an undisturbed node."""
    with running(tmp_path_factory.mktemp("calm"), model) as calm_service:
        return conversation(lambda: calm_service, "agent", lambda: None)


def test_eviction_and_restart_change_no_answer(
    model: str, undisturbed: list[str], tmp_path: Path
) -> None:
    """Answers after eviction and restart equal those of an undisturbed conversation."""
    with running(tmp_path, model, "evicted") as evicted:
        got = conversation(
            lambda: evicted, "agent", lambda: call(evicted, Flush(drop_hot=True), Done)
        )
    assert undisturbed == got
    services = [running(tmp_path, model, "restarted")]
    current = [services[0].__enter__()]

    def restart() -> None:
        services[-1].__exit__(None, None, None)
        services.append(running(tmp_path, model, "restarted"))
        current[0] = services[-1].__enter__()

    assert undisturbed == conversation(lambda: current[0], "agent", restart)
    services[-1].__exit__(None, None, None)


def test_migration_changes_no_answer_and_ships_only_missing_blocks(
    model: str, undisturbed: list[str], tmp_path: Path
) -> None:
    """Move back and forth between two nodes: same answers, one owner, a cheap way back."""
    with running(tmp_path, model, "left") as left, running(tmp_path, model, "right") as right:
        nodes, sent = [left, right], []

        def move() -> None:
            epoch = len(sent) + 1
            sent.append(migrate(nodes[0], nodes[1], "agent", epoch))
            nodes.reverse()

        assert undisturbed == conversation(lambda: nodes[0], "agent", move)
        assert sent[0].blocks_sent > sent[1].blocks_sent > 0
        assert sent[1].blocks_reused > 0
        with pytest.raises(FabricError, match="owned by"):
            ask(nodes[1], [user("hello")], agent="agent")
        listed = {n.node.name: call(n, ListAgents(), AgentList).agents[0].view for n in nodes}
        assert {"owned", "replica"} == {view.state for view in listed.values()}


@pytest.mark.nightly
def test_first_turn_after_migration_reports_peer_cache(model: str, tmp_path: Path) -> None:
    """The first turn on the new owner reports that its memory came from a peer."""
    messages = [SYSTEM, user("alpha")]
    with running(tmp_path, model, "left") as left, running(tmp_path, model, "right") as right:
        reply = ask(left, messages, agent="agent")
        migrate(left, right, "agent", 1)
        messages += [{"role": "assistant", "content": reply.text}, user("more")]
        moved = ask(right, messages, agent="agent", epoch=2)

    assert moved.admitted.cache is CacheTier.PEER
    assert moved.admitted.match is MatchKind.EXTEND
    assert moved.admitted.epoch == 2


def test_erase_removes_every_byte_but_shared_blocks(service: NodeService) -> None:
    """Erasing one of two agents with a common prompt keeps only what the other needs."""
    tenant = TenantId("erasing")
    before = service.node.resources.store.blocks.total_bytes
    for name in ("one", "two"):
        ask(service, [SYSTEM, user(name)], agent=name, tenant=tenant)
    receipts = [
        call(
            service,
            EraseAgent(
                tenant,
                AgentId(name),
                1_001,
                OperationId(f"erase-000{i}"),
                service.node.resources.clock.wall_s(),
            ),
            EraseReceipt,
        )
        for i, name in enumerate(("one", "two", "one"))
    ]

    assert [receipt.existed for receipt in receipts] == [True, True, False]
    assert receipts[0].blocks_kept_shared > 0
    assert receipts[1].blocks_kept_shared == 0
    assert before == service.node.resources.store.blocks.total_bytes


def test_prompt_over_the_context_is_refused_and_keeps_the_agent(model: str, tmp_path: Path) -> None:
    """Too long a prompt is the client's error; the agent keeps its memory."""
    with running(tmp_path, model, context_tokens_max=600) as small:
        first = ask(small, [user("alpha")], agent="agent")
        with pytest.raises(FabricError, match="maximum context length is 600") as caught:
            ask(small, [SYSTEM, SYSTEM, user("alpha")], agent="agent")
        again = ask(small, [user("alpha")], agent="agent")

    assert caught.value.status == 400
    assert first.text == again.text
    assert again.admitted.match is MatchKind.EXACT


def test_damaged_block_is_a_miss_with_the_same_answer(model: str, tmp_path: Path) -> None:
    """A flipped bit on disk costs a re-prefill of what follows it, never a wrong answer."""
    messages = [SYSTEM, user("alpha")]
    with running(tmp_path, model) as service:
        first = ask(service, messages, agent="agent")
        saved = next(iter(service.node.resources.table)).saved
        assert saved is not None
        second_block = saved.pieces[1].block.name
    damaged = next(path for path in tmp_path.rglob("*") if second_block in path.name)
    raw = bytearray(damaged.read_bytes())
    raw[-5_000] ^= 4
    damaged.write_bytes(raw)
    with running(tmp_path, model) as service:
        again = ask(service, messages, agent="agent")

    assert again.admitted.cached_tokens == 256
    assert first.text == again.text
