"""A decision's snapshot of the router's tables."""

from dataclasses import replace

import pytest

from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.record.manifest import OwnerState
from fabric.turn.generation import Identity, IdentityKind, Sampling
from fabric.turn.messages import Message, MessageRole
from router.fleet import snapshots
from router.fleet.membership import LeaseState, Membership
from router.placement.decision import Ship
from router.prompt import chat_prompt
from router.turn_request import TurnRequest
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
A, B, C = (NodeName(f"node-{letter}") for letter in "abc")
KEY = (TenantId("default"), AgentId("alice"))
LONG = "word " * 1000
OWNED, REPLICA, SEALED = OwnerState.OWNED, OwnerState.REPLICA, OwnerState.SEALED
SYSTEM, USER, ASSISTANT = MessageRole.SYSTEM, MessageRole.USER, MessageRole.ASSISTANT


def turn(kind, agent=None, text=LONG):
    message = Message(MessageRole.USER, text)
    identity = Identity(kind, agent)
    prompt = chat_prompt([message])
    return TurnRequest(OperationId("op"), KEY[0], "echo", identity, Sampling(), prompt)


NAMED = turn(IdentityKind.AGENT, KEY[1])
UNNAMED = turn(IdentityKind.CONTENT)
GROUPED = turn(IdentityKind.GROUP, AgentId("team"))


def roles(snapshot):
    return [(each.node, each.role.value) for each in snapshot.holders]


async def test_holders_are_ordered_by_serving_priority():
    async with rig("abc", tended=False) as fabric:
        fleet, directory = fabric.fleet, fabric.fleet.directory

        def holder_roles(*holdings):
            for node, epoch, state in holdings:
                fleet.note_holding(KEY, node, epoch, state)
            result = roles(snapshots.of_agent(fleet, KEY))
            assert result == roles(snapshots.of_turn(fleet, NAMED))
            return result

        assert holder_roles() == []
        owner = [(A, "owner"), (C, "copy"), (B, "copy")]
        assert holder_roles((B, 1, OWNED), (C, 2, REPLICA), (A, 3, SEALED)) == owner
        directory.reserve(KEY, B, 3)
        assert holder_roles() == owner, "a start at no higher epoch is ignored"
        started = directory.reserve(KEY, B, 4)
        started.turns_count = 1
        assert holder_roles() == [(B, "starting"), *owner]
        directory.release(KEY, started)
        directory.floor = lambda _: 2
        assert holder_roles() == [(A, "owner"), (B, "erased"), (C, "erased")]
        assert holder_roles((A, 5, REPLICA)) == [(A, "released"), (B, "erased"), (C, "erased")]


async def test_snapshot_joins_node_reports_and_ledger():
    async with rig("ab", tended=False) as fabric:
        fabric[A].view_changes = {"prefill_tokens_per_s": 700.0, "state": "draining"}
        await fabric.fleet.membership.refresh()
        fabric.fleet.ledger.begin(A, 2.5, cold=True)
        fabric.fleet.ledger.begin(B, 0.0, cold=False)
        fabric.fleet.directory.reserve(KEY, B, 1)
        with fabric.fleet.ledger.shipping(Ship(A, B, 5_000, 1.0)):
            nodes = snapshots.of_agent(fabric.fleet, KEY).nodes

    assert (nodes[A].coming_bytes, nodes[B].coming_bytes) == (0, 5_000)
    assert nodes[B].held_tokens > 0
    a, b = nodes[A], nodes[B]
    assert (a.view.prefill_tokens_per_s, a.is_ready, b.is_ready) == (700.0, False, True)
    assert (a.promised_s, a.turns, a.turn_order, a.cold_order, a.agents) == (2.5, 1, 1, 1, 0)
    assert (b.promised_s, b.turns, b.turn_order, b.cold_order, b.agents) == (0.0, 1, 2, 0, 1)


async def test_reported_queue_of_this_routers_ended_prompts_does_not_count():
    """A heartbeat overtaken by the prompt's end must not make the node look busy."""
    async with rig("a", tended=False) as fabric:
        ledger, membership = fabric.fleet.ledger, fabric.fleet.membership

        def queue_s():
            node = snapshots.of_agent(fabric.fleet, KEY).nodes[A]
            return node.queue_s(fabric.fleet.clock.monotonic_s())

        ours = ledger.begin(A, 5.0, cold=True)
        fabric[A].view_changes = {"queue_s": 8.0, "waiting": 1, "active": 0}
        await membership.refresh()
        assert queue_s() == 5.0, "the ledger's estimate of its own prompt"
        ledger.end(ours)
        assert queue_s() == 0.0

        ours = ledger.begin(A, 5.0, cold=True)
        ledger.end(ours)  # after the node's last report
        await membership.refresh()
        assert queue_s() == 0.0

        ours = ledger.begin(A, 5.0, cold=True)
        fabric[A].view_changes = {"queue_s": 8.0, "waiting": 2, "active": 0}
        await membership.refresh()
        assert 7.5 < queue_s() <= 8.0, "with the other router's prompt"
        ledger.end(ours)
        assert 2.5 < queue_s() <= 3.0

        await membership.refresh()  # perhaps reported before our prompt ended
        await membership.refresh()
        assert 7.5 < queue_s() <= 8.0, "the whole queue is the other router's"


@pytest.mark.parametrize(
    ("lease", "is_alive", "is_up"),
    [
        (LeaseState.ALIVE, True, True),
        (LeaseState.SUSPECT, False, True),
        (LeaseState.EXPIRED, False, False),
    ],
)
async def test_snapshot_reflects_lease_states(lease, is_alive, is_up, monkeypatch):
    async with rig("ab", tended=False) as fabric:
        monkeypatch.setattr(Membership, "health", lambda self, name: lease)
        monkeypatch.setattr(Membership, "is_returning", lambda self, name: name == B)
        nodes = snapshots.of_agent(fabric.fleet, KEY).nodes

    assert {(each.is_alive, each.is_up) for each in nodes.values()} == {(is_alive, is_up)}
    assert (nodes[A].is_returning, nodes[B].is_returning) == (False, True)


async def test_nodes_without_report_are_omitted():
    async with rig("ab", started=False, tended=False) as fabric:
        await fabric.fleet.membership.discover()

        assert snapshots.of_agent(fabric.fleet, KEY).nodes == {}


async def test_prefix_holders_are_ordered_by_share():
    async with rig("abc", tended=False) as fabric:
        fleet, prompt = fabric.fleet, UNNAMED.prompt
        fleet.sketches.put(KEY[0], A, "bob", (*prompt.sketch[:4], 1), opening=1)
        fleet.sketches.put(KEY[0], B, "alice", prompt.sketch[:8], opening=prompt.opening)
        fleet.sketches.put(KEY[0], C, "mira", prompt.sketch[:8], opening=prompt.opening)
        fleet.note_holding(KEY, B, 1, REPLICA, "team")
        found = snapshots.of_turn(fleet, UNNAMED).prefixes
        other = snapshots.of_turn(fleet, replace(UNNAMED, tenant=TenantId("other"))).prefixes

    pieces = len(prompt.sketch)
    assert [(each.node, round(each.share * pieces)) for each in found] == [(C, 8), (B, 8), (A, 4)]
    assert [each.agent for each in found] == ["mira", "alice", None]
    assert [each.is_replica for each in found] == [False, True, False]
    assert [each.is_resident for each in found] == [False, True, False]
    assert [each.group for each in found] == [None, "team", None]
    assert other == ()


async def test_agent_on_disk_only_is_not_resident():
    async with rig("a", tended=False) as fabric:
        await fabric.chat(LONG, agent="alice")
        await fabric.fleet.membership.refresh(relist=True)
        view = fabric.fleet.directory.owner(KEY).view
        before = snapshots.of_turn(fabric.fleet, NAMED)
        on_disk = replace(view, tiers=("disk",))
        fabric.fleet.note_holding(KEY, A, view.epoch + 1, OWNED, view=on_disk)
        after = snapshots.of_turn(fabric.fleet, NAMED)

    assert (before.prefixes[0].agent, after.prefixes[0].agent) == ("alice", "alice")
    assert [s.prefixes[0].is_resident for s in (before, after)] == [True, False]
    assert after.holders[0].view.tokens > 0


async def test_group_owners_are_listed_for_group_turns_only():
    async with rig("abc", tended=False) as fabric:
        fabric.fleet.note_holding((KEY[0], AgentId("x")), B, 1, OWNED, "team")
        fabric.fleet.note_holding((KEY[0], AgentId("team")), C, 1, OWNED, "team")

        assert snapshots.of_turn(fabric.fleet, GROUPED).group_nodes == (C, B)
        assert snapshots.of_turn(fabric.fleet, NAMED).group_nodes == ()


def test_turn_facts_follow_identity():
    named, unnamed, grouped = map(snapshots.facts_of, (NAMED, UNNAMED, GROUPED))

    assert (named.agent, named.group) == ("alice", None)
    assert (unnamed.agent, unnamed.group) == (None, None)
    assert (grouped.agent, grouped.group) == (None, "team")
    assert unnamed.home_seed == f"default:{UNNAMED.prompt.opening}"
    assert grouped.home_seed == "default:team"
    assert named.prompt_tokens == NAMED.prompt.tokens_estimate > 1000
    assert named.model == "echo"


async def test_owner_of_rewritten_conversation_is_found_by_form():
    def chat(clock, *more):
        return replace(UNNAMED, prompt=chat_prompt([Message(SYSTEM, (f"It is {clock}.",)), *more]))

    question, answer = Message(USER, ("Where?",)), Message(ASSISTANT, ("There.",))
    before = chat("09:41", question)
    now = chat("09:42", question, answer, Message(USER, ("And now?",)))
    async with rig("abc", tended=False) as fabric:
        fleet, sketches, tenant = fabric.fleet, fabric.fleet.sketches, KEY[0]
        assert not snapshots.of_turn(fleet, now).prefixes
        sketches.put(tenant, B, "alice", before.prompt.sketch, form=before.prompt.form)
        assert not snapshots.of_turn(fleet, now).prefixes  # no node owns it
        fleet.note_holding(KEY, B, 1, OWNED, "team")
        (found,) = snapshots.of_turn(fleet, now).prefixes
        fleet.note_holding(KEY, B, 2, REPLICA, "team")
        fleet.note_holding(KEY, C, 2, OWNED, "team")
        (moved,) = snapshots.of_turn(fleet, now).prefixes
        named = snapshots.of_turn(fleet, replace(now, identity=NAMED.identity)).prefixes
        other = snapshots.of_turn(fleet, replace(now, tenant=TenantId("other"))).prefixes
        sketches.remove(tenant, B, "alice")
        gone = snapshots.of_turn(fleet, now).prefixes

    assert (found.node, found.agent, found.group, found.is_replica) == (B, "alice", "team", False)
    assert (moved.node, moved.agent) == (C, "alice")
    assert named == other == gone == ()
