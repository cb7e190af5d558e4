"""After a restart, turns wait for the node that has their agent, no longer than a prefill takes."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from fabric.errors import ConflictError
from fabric.ids import NodeName
from fabric.settings import RouterSettings
from fabric.turn.messages import Message, MessageRole
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.node_discovery import NodeDiscovery
from router.prompt import chat_prompt
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
KEY = ("default", "alice")
PROMPT = "word " * 8_000  # 10 s of prefill on a fake node


def node_of(answer):
    return answer.headers["x-macfabric-node"]


@asynccontextmanager
async def partial_fabric(**options):
    """Run a fabric of two nodes; node-b has Alice, and has not joined yet."""
    nodes = [FakeNode("node-a"), FakeNode("node-b")]
    sketch = chat_prompt([Message(MessageRole.USER, (PROMPT,))]).sketch
    nodes[1].memory[KEY] = Memory(*KEY, epoch=4, text=f"<user>{PROMPT}", sketch=sketch)
    settings = RouterSettings(nodes_expected=2)
    async with rig(nodes=nodes, settings=settings, started=False, **options) as fabric:
        fabric.late = fabric.listed.pop("node-b")
        await until(fabric.fleet.ready)
        await until(fabric.fleet.membership.is_settled)
        yield fabric


@pytest.fixture
def wait_limits(monkeypatch):
    """Record the time limit of every turn that waits, in seconds."""
    owner, seconds = NodeDiscovery.wait_for_owner, []

    def record_and_wait(discovery, is_known, patience_s):
        seconds.append(patience_s)
        return owner(discovery, is_known, patience_s)

    monkeypatch.setattr(NodeDiscovery, "wait_for_owner", record_and_wait)
    return seconds


def join(fabric):
    fabric.listed["node-b"] = fabric.late


async def ask_then_join(fabric, *contents, **options):
    asking = asyncio.create_task(fabric.chat(*contents, **options))
    await asyncio.sleep(0.3)
    was_answered = asking.done()
    join(fabric)
    return was_answered, await asking


async def test_turn_waits_for_node_with_its_agent():
    async with partial_fabric() as fabric:
        was_answered, answer = await ask_then_join(fabric, PROMPT, "noted", "and?", agent="alice")

    assert (was_answered, node_of(answer)) == (False, "node-b")
    assert answer.headers["x-macfabric-epoch"] == "4", "the agent was not started again"


async def test_conversation_found_by_content_waits_for_owner():
    async with partial_fabric() as fabric:
        was_answered, answer = await ask_then_join(fabric, PROMPT, "noted", "and?")

    assert (was_answered, node_of(answer)) == (False, "node-b")
    assert answer.headers["x-macfabric-agent"] == "alice"


@pytest.mark.parametrize("agent", ["alice", None])
async def test_owner_wait_lasts_as_long_as_prefill_without_new_nodes(agent):
    async with partial_fabric(scale=4.0) as fabric:
        began_s = fabric.fleet.clock.monotonic_s()
        answer = await fabric.chat(PROMPT, "noted", "and?", agent=agent)
        waited_s = fabric.fleet.clock.monotonic_s() - began_s
        again = asyncio.create_task(fabric.chat(PROMPT, "noted", "and then?", agent=agent))
        first, _ = await asyncio.wait({again}, timeout=30)

    assert node_of(answer) == "node-a"
    assert waited_s >= len(PROMPT) / 4 / 1000.0
    assert first == {again}


async def test_next_turn_waits_while_the_first_one_is_computed_elsewhere():
    """A single node would recompute both prompts, so the second one's owner has twice the time."""
    async with partial_fabric(scale=4.0) as fabric:
        for agent in ("alice", "bella"):
            fabric.late.memory["default", agent] = Memory("default", agent, epoch=4)
        fabric["node-a"].behaviour.first_delay_s = 60.0  # computing the first turn
        turns = [
            asyncio.create_task(fabric.chat(PROMPT, "noted", "and?", agent=agent))
            for agent in ("alice", "bella")
        ]
        await until(lambda: fabric["node-a"].requests)
        join(fabric)
        done, others = await asyncio.wait(turns, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        for each in others:
            each.cancel()

    assert [node_of(each.result()) for each in done] == ["node-b"]


async def test_owner_wait_is_capped(monkeypatch):
    monkeypatch.setattr("router.turns.owner_wait.OWNER_WAIT_S_MAX", 0.5)
    async with partial_fabric() as fabric:
        fabric["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await fabric.fleet.membership.refresh()
        answer = await fabric.chat(PROMPT, "noted", "and?", agent="alice")

    assert node_of(answer) == "node-a"


async def test_new_conversation_does_not_wait(wait_limits):
    async with partial_fabric() as fabric:
        fabric["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await fabric.fleet.membership.refresh()
        answer = await fabric.chat(PROMPT)

    assert (node_of(answer), wait_limits) == ("node-a", [])


async def test_short_conversation_waits(wait_limits):
    async with partial_fabric() as fabric:
        await fabric.chat("hi", "noted", "and?")

    assert len(wait_limits) == 1


async def test_known_agent_does_not_wait(wait_limits):
    async with partial_fabric() as fabric:
        bob = await fabric.chat("hi", agent="bob")
        wait_limits.clear()
        fabric["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await fabric.fleet.membership.refresh()
        answer = await fabric.chat(PROMPT, "noted", "and?", agent="bob")

    assert {node_of(bob), node_of(answer)} == {"node-a"}
    assert wait_limits == []


async def test_late_node_is_not_awaited(wait_limits):
    async with partial_fabric() as fabric:
        fabric["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await fabric.fleet.membership.refresh()
        fabric.fleet.discovery._gathered_s = fabric.fleet.clock.monotonic_s()
        answer = await fabric.chat(PROMPT, "noted", "and?", agent="alice")

    assert node_of(answer) == "node-a"
    assert wait_limits == []
    assert int(answer.headers["x-macfabric-epoch"]) > 1_024, "node-b may still own the agent"


async def test_loading_node_is_awaited():
    async with partial_fabric() as fabric:
        fabric.fleet.discovery._gathered_s = fabric.fleet.clock.monotonic_s()  # node-b joins later
        fabric.late.is_loading = True
        join(fabric)
        await until(lambda: fabric.fleet.membership.find("node-b"))
        await fabric.fleet.membership.refresh()
        asking = asyncio.create_task(fabric.chat(PROMPT, "noted", "and?", agent="alice"))
        await asyncio.sleep(0.3)
        fabric.late.is_loading = False
        answer = await asking

    assert node_of(answer) == "node-b"


@pytest.mark.parametrize("count", [1, 2])
async def test_waiting_stream_names_awaited_nodes(count, monkeypatch):
    monkeypatch.setattr("router.api.late_stream.STREAM_SILENCE_S", 0.1)
    async with partial_fabric() as fabric:
        options = {"agent": "alice", "stream": True, "n": count}
        was_answered, answer = await ask_then_join(fabric, PROMPT, "noted", "and?", **options)

    assert not was_answered
    assert answer.status_code == 200
    first, headers, data = answer.text.split("\n\n")[:3]
    assert first == ": waiting for 1 node without a known name"
    facts = dict(line.removeprefix(": ").split(": ", 1) for line in headers.splitlines())
    assert {name.partition("-")[0] for name in facts} == {"x"}
    assert (facts["x-macfabric-node"], facts["x-macfabric-agent"]) == ("node-b", "alice")
    assert int(facts["x-macfabric-cached-tokens"]) > 0
    assert data.startswith("data: ")
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_stream_that_waited_in_vain_ends_with_error(monkeypatch):
    monkeypatch.setattr("router.api.late_stream.STREAM_SILENCE_S", 0.1)
    async with partial_fabric(scale=4.0) as fabric:
        fabric["node-a"].behaviour.refuse = ConflictError("not now", code="busy")
        answer = await fabric.chat(PROMPT, "noted", "and?", agent="alice", stream=True)

    assert answer.status_code == 200
    assert answer.text.startswith(": waiting for ")
    assert '"code":"busy"' in answer.text


async def test_health_reports_partial_fabric():
    async with partial_fabric() as fabric:
        http = fabric.http()
        partial = await http.get("/healthz")
        stranger = await fabric.http(operates=False).get("/healthz")
        fabric.fleet.discovery.expected = ExpectedNodes(
            names=(NodeName("node-a"), NodeName("node-b"))
        )
        named = (await http.get("/healthz")).json()
        join(fabric)
        await until(fabric.fleet.membership.has_all_reports)
        await until(lambda: not fabric.fleet.discovery.awaited_nodes())
        whole = (await http.get("/healthz")).json()

    assert (partial.status_code, partial.json()["status"]) == (200, "partial")
    assert (partial.json()["missing"], partial.json()["unmet"]) == ([], 1)
    assert stranger.json() == {"status": "partial"}
    assert (named["status"], named["missing"]) == ("partial", ["node-b"])
    assert (whole["status"], whole["missing"], whole["unmet"]) == ("ok", [], 0)


async def test_generate_is_503_while_agent_may_be_on_awaited_node():
    async with partial_fabric() as fabric:
        answer = await fabric.http().post("/v1/agents/alice/generate", json={"text": "and?"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "agents_unknown")
    assert answer.headers["retry-after"]
