"""Expected agents are loaded, unless turns wait; sessions are placement hints."""

import asyncio
from dataclasses import replace

import pytest

from fabric.errors import OverloadedError
from fabric.ids import AgentId, NodeName
from fabric.settings import RouterSettings
from fabric.turn.generation import Identity, IdentityKind
from router.fleet import snapshots
from tests.router.rig import KEY, OTHER_KEY, rig, until
from tests.router.turns.test_coming_heads import request

pytestmark = pytest.mark.anyio
NAMES = ["ann", "ben", "cid"]
LONG = "word " * 400


def guess_count(fabric, outcome):
    name = "macfabric_guessed_turns_total"
    return fabric.services.telemetry.registry.get_sample_value(name, {"outcome": outcome}) or 0


async def rounds(fabric, count, names=NAMES, http=None):
    for _ in range(count):
        for name in names:
            answer = await fabric.chat("hi", agent=name, http=http)
            assert answer.status_code == 200


async def test_the_next_agent_is_loaded_while_the_current_one_decodes():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        await rounds(fabric, 2)
        assert node.calls["prefetch_agent"] == 0, "no order is known yet"
        await fabric.chat("hi", agent="ann")
        for memory in node.memory.values():
            memory.hot = False
        node.behaviour.delay_s = 0.05
        answering = asyncio.create_task(fabric.chat("hi", agent="ben"))
        await until(lambda: node.memory["default", "cid"].hot)
        assert not answering.done(), "the current agent is still answering"
        await answering
        assert not node.memory["default", "ann"].hot, "only the next agent is loaded"
        node.behaviour.delay_s = 0.0
        await fabric.chat("hi", agent="cid")

    assert guess_count(fabric, "right") == 2
    assert guess_count(fabric, "wrong") == 0


async def test_a_wrong_guess_is_counted_and_the_turn_is_served():
    async with rig("a") as fabric:
        await rounds(fabric, 3)
        await until(lambda: guess_count(fabric, "right") >= 2)
        answer = await fabric.chat("hi", agent="ben")  # instead of ann
        assert answer.status_code == 200
        await until(lambda: guess_count(fabric, "wrong") == 1)


async def test_no_agent_is_loaded_while_turns_wait_for_the_node():
    async with rig("a") as fabric:
        await rounds(fabric, 2)
        before = fabric["node-a"].calls["prefetch_agent"]
        queues = fabric.services.turns.queues
        counted, queues.waiting_count = queues.waiting_count, lambda _: 1
        await rounds(fabric, 1)
        queues.waiting_count = counted
        assert fabric["node-a"].calls["prefetch_agent"] == before
        assert guess_count(fabric, "refused") == 3

        full = OverloadedError("turns wait for this node", code="turns_wait")
        fabric["node-a"].behaviour.fail["prefetch_agent"] = full
        await rounds(fabric, 1)
        await until(lambda: guess_count(fabric, "refused") == 6)


async def test_orders_of_tenants_with_the_same_names_are_apart():
    keys = {"one": KEY, "two": OTHER_KEY}
    settings = RouterSettings(takeover_after_s=20.0, api_keys=keys, loopback_without_key=False)
    async with rig("a", settings=settings) as fabric:
        await rounds(fabric, 3, http=fabric.http(KEY))
        await until(lambda: fabric["node-a"].calls["prefetch_agent"] == 3)
        await rounds(fabric, 2, http=fabric.http(OTHER_KEY))
        assert fabric["node-a"].calls["prefetch_agent"] == 3


SESSIONS = [
    {"x-claude-code-session-id": "0b6f-11"},
    {"session-id": "0b6f-11", "thread-id": "of-the-child"},
    {"session_id": "0b6f-11"},
    {"x-session-affinity": "0b6f-11", "x-session-id": "0b6f-11"},
    {"x-opencode-session": "0b6f-11"},
    {"x-codex-parent-thread-id": "0b6f-11", "session-id": "of-the-child"},
    {"thread-id": "0b6f-11"},
    {"conversation_id": "0b6f-11"},
    {"x-claude-code-session-id": "0b6f-11", "x-claude-code-agent-id": "a0bed82"},
]


@pytest.mark.parametrize("headers", SESSIONS, ids=lambda headers: next(iter(headers)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_conversation_without_a_known_beginning_starts_beside_its_session(headers, path):
    """No other hint applies. The conversation is a separate agent."""
    async with rig("ab") as fabric:
        one = await begin(fabric, path, f"task one {LONG}", headers)
        for number in range(8):  # until both nodes have the same number of agents
            if len(fabric["node-a"].memory) == len(fabric["node-b"].memory):
                break
            await begin(fabric, path, f"other {number} {LONG}", {})
        assert len(fabric["node-a"].memory) == len(fabric["node-b"].memory)
        await fabric.fleet.membership.refresh()
        two = await begin(fabric, path, f"task two {LONG}", headers)

    assert two.headers["x-macfabric-node"] == one.headers["x-macfabric-node"]
    assert two.headers["x-macfabric-agent"] != one.headers["x-macfabric-agent"]
    assert two.headers["x-macfabric-cached-tokens"] == "0"


async def begin(fabric, path, text, headers):
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = await fabric.http().post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_child_of_a_session_is_beside_its_parent():
    """The parent's session decides, not its own."""
    async with rig("abcd") as fabric:
        path = "/v1/chat/completions"
        parent = await begin(fabric, path, f"parent {LONG}", {"x-session-id": "ses-parent"})
        child_of = {"x-session-id": "ses-child", "x-parent-session-id": "ses-parent"}
        child = await begin(fabric, path, f"child {LONG}", child_of)
        assert fabric.fleet.sessions.nodes("default", "ses-parent") == (
            child.headers["x-macfabric-node"],
        )
        assert fabric.fleet.sessions.nodes("default", "ses-child") == ()
    assert parent.headers["x-macfabric-agent"] != child.headers["x-macfabric-agent"]


@pytest.mark.parametrize("of_group", [False, True], ids=["session", "group"])
async def test_a_sub_agent_without_a_known_beginning_starts_on_its_last_node(of_group):
    """This happens after a summary, even if its parent has used another node since."""
    async with rig("ab") as fabric:
        fleet, session = fabric.fleet, AgentId("session")
        turn = request(1, kind=IdentityKind.CONTENT)
        turn = replace(turn, session=session, sub_agent=AgentId("child"))
        if of_group:
            turn = replace(turn, identity=Identity(IdentityKind.GROUP, AgentId("crew")))
        fleet.sessions.note(turn.tenant, NodeName("node-a"), session, turn.sub_agent)
        fleet.sessions.note(turn.tenant, NodeName("node-b"), session)

        assert snapshots.of_turn(fleet, turn).group_nodes[0] == "node-a"
        parent = snapshots.of_turn(fleet, replace(turn, sub_agent=None))
        assert parent.group_nodes == (() if of_group else ("node-b",))


@pytest.mark.parametrize("header", ["x-claude-code-agent-id", "x-claude-code-session-id"])
async def test_hints_neither_merge_conversations_nor_fork_one(header):
    async with rig("a") as fabric:
        path = "/v1/messages"
        one = await begin(fabric, path, f"task one {LONG}", {header: "mine"})
        two = await begin(fabric, path, f"task two {LONG}", {header: "mine"})
        again = await begin(fabric, path, f"task one {LONG}", {header: "another"})
        agents = [each.headers["x-macfabric-agent"] for each in (one, two, again)]
        assert fabric.fleet.sessions.nodes("default", "mine") == ("node-a",)
    assert agents[0] != agents[1]
    assert agents[0] == agents[2]


async def test_a_session_that_is_too_long_or_of_another_tenant_is_no_hint():
    async with rig("ab") as fabric:
        path = "/v1/chat/completions"
        await begin(fabric, path, LONG, {"x-session-id": "x" * 600})
        await begin(fabric, path, LONG, {"x-session-id": "mine"})
        assert len(fabric.fleet.sessions._nodes) == 1
        assert fabric.fleet.sessions.nodes("other", "mine") == ()
