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
SAID = "word " * 8_000  # 10 s of prefill on a fake node


def node_of(answer):
    return answer.headers["x-macfabric-node"]


@asynccontextmanager
async def joined_in_part(**options):
    """Run a fabric of two nodes; node-b has Alice, and has not joined yet."""
    nodes = [FakeNode("node-a"), FakeNode("node-b")]
    sketch = chat_prompt([Message(MessageRole.USER, (SAID,))]).sketch
    nodes[1].memory[KEY] = Memory(*KEY, epoch=4, text=f"<user>{SAID}", sketch=sketch)
    settings = RouterSettings(nodes_expected=2)
    async with rig(nodes=nodes, settings=settings, started=False, **options) as made:
        made.late = made.listed.pop("node-b")
        await until(made.fleet.ready)
        await until(made.fleet.membership.settled)
        yield made


@pytest.fixture
def waits(monkeypatch):
    """Return the patience of every turn that waits, in seconds."""
    owner, seconds = NodeDiscovery.wait_for_owner, []

    def noted(discovery, is_known, patience_s):
        seconds.append(patience_s)
        return owner(discovery, is_known, patience_s)

    monkeypatch.setattr(NodeDiscovery, "wait_for_owner", noted)
    return seconds


def join(made):
    made.listed["node-b"] = made.late


async def ask_then_join(made, *said, **options):
    asking = asyncio.create_task(made.chat(*said, **options))
    await asyncio.sleep(0.3)
    was_answered = asking.done()
    join(made)
    return was_answered, await asking


async def test_a_turn_waits_for_the_node_that_has_its_agent():
    async with joined_in_part() as made:
        was_answered, answer = await ask_then_join(made, SAID, "noted", "and?", agent="alice")

    assert (was_answered, node_of(answer)) == (False, "node-b")
    assert answer.headers["x-macfabric-epoch"] == "4", "it was not begun anew"


async def test_a_conversation_found_by_its_content_waits_likewise():
    async with joined_in_part() as made:
        was_answered, answer = await ask_then_join(made, SAID, "noted", "and?")

    assert (was_answered, node_of(answer)) == (False, "node-b")
    assert answer.headers["x-macfabric-agent"] == "alice"


@pytest.mark.parametrize("agent", ["alice", None])
async def test_where_no_node_joins_a_turn_waits_as_long_as_its_prefill_takes(agent):
    async with joined_in_part(scale=4.0) as made:
        began_s = made.fleet.clock.monotonic_s()
        answer = await made.chat(SAID, "noted", "and?", agent=agent)
        waited_s = made.fleet.clock.monotonic_s() - began_s
        again = asyncio.create_task(made.chat(SAID, "noted", "and then?", agent=agent))
        first, _ = await asyncio.wait({again}, timeout=30)

    assert node_of(answer) == "node-a"
    assert waited_s >= len(SAID) / 4 / 1000.0
    assert first == {again}


async def test_the_wait_has_a_ceiling(monkeypatch):
    monkeypatch.setattr("router.turns.owner_wait.OWNER_WAIT_S_MAX", 0.5)
    async with joined_in_part() as made:
        made["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await made.fleet.membership.refresh()
        answer = await made.chat(SAID, "noted", "and?", agent="alice")

    assert node_of(answer) == "node-a"


async def test_a_conversation_that_just_began_does_not_wait(waits):
    async with joined_in_part() as made:
        made["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await made.fleet.membership.refresh()
        answer = await made.chat(SAID)

    assert (node_of(answer), waits) == ("node-a", [])


async def test_a_short_conversation_waits_likewise(waits):
    async with joined_in_part() as made:
        await made.chat("hi", "noted", "and?")

    assert len(waits) == 1


async def test_an_agent_that_was_begun_or_reported_does_not_wait(waits):
    async with joined_in_part() as made:
        bob = await made.chat("hi", agent="bob")
        waits.clear()
        made["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await made.fleet.membership.refresh()
        answer = await made.chat(SAID, "noted", "and?", agent="bob")

    assert {node_of(bob), node_of(answer)} == {"node-a"}
    assert waits == []


async def test_a_node_that_missed_its_time_is_not_waited_for(waits):
    async with joined_in_part() as made:
        made["node-a"].view_changes = {"prefill_tokens_per_s": 0.1}
        await made.fleet.membership.refresh()
        made.fleet.discovery._gathered_s = made.fleet.clock.monotonic_s()
        answer = await made.chat(SAID, "noted", "and?", agent="alice")

    assert node_of(answer) == "node-a"
    assert waits == []
    assert int(answer.headers["x-macfabric-epoch"]) > 1_024, "node-b may still own her"


async def test_a_node_that_loads_when_the_router_meets_it_is_waited_for():
    async with joined_in_part() as made:
        made.fleet.discovery._gathered_s = made.fleet.clock.monotonic_s()  # it came much later
        made.late.is_loading = True
        join(made)
        await until(lambda: made.fleet.membership.find("node-b"))
        await made.fleet.membership.refresh()
        asking = asyncio.create_task(made.chat(SAID, "noted", "and?", agent="alice"))
        await asyncio.sleep(0.3)
        made.late.is_loading = False
        answer = await asking

    assert node_of(answer) == "node-b"


@pytest.mark.parametrize("count", [1, 2])
async def test_a_waiting_stream_names_what_it_waits_for(count, monkeypatch):
    monkeypatch.setattr("router.api.late_stream.STREAM_SILENCE_S", 0.1)
    async with joined_in_part() as made:
        options = {"agent": "alice", "stream": True, "n": count}
        was_answered, answer = await ask_then_join(made, SAID, "noted", "and?", **options)

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


async def test_a_stream_that_waited_in_vain_ends_with_an_error(monkeypatch):
    monkeypatch.setattr("router.api.late_stream.STREAM_SILENCE_S", 0.1)
    async with joined_in_part(scale=4.0) as made:
        made["node-a"].does.refuse = ConflictError("not now", code="busy")
        answer = await made.chat(SAID, "noted", "and?", agent="alice", stream=True)

    assert answer.status_code == 200
    assert answer.text.startswith(": waiting for ")
    assert '"code":"busy"' in answer.text


async def test_health_reports_a_fabric_that_serves_in_part():
    async with joined_in_part() as made:
        http = made.http()
        partial = await http.get("/healthz")
        stranger = await made.http(operates=False).get("/healthz")
        made.fleet.discovery.expected = ExpectedNodes(
            names=(NodeName("node-a"), NodeName("node-b"))
        )
        named = (await http.get("/healthz")).json()
        join(made)
        await until(made.fleet.membership.has_all_reports)
        await until(lambda: not made.fleet.discovery.awaited())
        whole = (await http.get("/healthz")).json()

    assert (partial.status_code, partial.json()["status"]) == (200, "partial")
    assert (partial.json()["missing"], partial.json()["unmet"]) == ([], 1)
    assert stranger.json() == {"status": "partial"}
    assert (named["status"], named["missing"]) == ("partial", ["node-b"])
    assert (whole["status"], whole["missing"], whole["unmet"]) == ("ok", [], 0)


async def test_generate_does_not_begin_an_agent_that_an_awaited_node_may_have():
    async with joined_in_part() as made:
        answer = await made.http().post("/v1/agents/alice/generate", json={"text": "and?"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "agents_unknown")
    assert answer.headers["retry-after"]
