import asyncio

import pytest

from fabric.errors import NotFoundError
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from router.moves import replicas as replicas_module
from tests.router.fake_copies import owned
from tests.router.fake_node import FakeNode
from tests.router.rig import KEY, OTHER_KEY, SOON, rig, until

pytestmark = pytest.mark.anyio
LONG = "word " * 400
TWO_TENANTS = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY}, takeover_after_s=0.3)


def post(fabric, path, http=None, **body):
    return (http or fabric.http()).post(f"/v1/agents/{path}", json=body)


async def start_agent(fabric, agent="alice", **options):
    """Start an agent; return its node and another one."""
    answer = await fabric.chat(LONG, agent=agent, **options)
    home = fabric[answer.headers["x-macfabric-node"]]
    return home, next(node for node in fabric.nodes.values() if node is not home)


# --- forks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
async def test_fork_starts_with_full_memory_of_its_agent(where):
    async with rig() as fabric:
        home, other = await start_agent(fabric)
        to = {} if where == "beside" else {"to": other.name}
        forked = (await post(fabric, "alice/fork", **{"as": "bob"}, **to)).json()
        first = await fabric.chat(LONG, "x", "to bob", agent="bob")
        original = await fabric.chat(LONG, "x", "to alice", agent="alice")
        gone = await fabric.http().delete("/v1/agents/alice")
        still = await fabric.chat(LONG, "x", "to bob", "y", "z", agent="bob")

    at = home.name if where == "beside" else other.name
    assert (forked["id"], forked["forked_from"], forked["node"]) == ("bob", "alice", at)
    assert (forked["epoch"], forked["tokens"]) == (1, len(f"<user>{LONG}"))
    assert (forked["blocks_sent"] == 0) is (where == "beside")
    assert first.headers["x-macfabric-node"] == at
    assert first.headers["x-macfabric-match"] == "extend"
    assert int(first.headers["x-macfabric-cached-tokens"]) == len(f"<user>{LONG}")
    assert original.headers["x-macfabric-match"] == "extend"
    assert gone.json()["deleted"] is True
    assert still.headers["x-macfabric-match"] == "extend"


async def test_fork_goes_to_another_node_when_its_node_drains():
    async with rig("ab") as fabric:
        home, other = await start_agent(fabric)
        home.is_draining = True
        forked = await post(fabric, "alice/fork", **{"as": "bob"})
        refused = await post(fabric, "alice/fork", **{"as": "carol", "to": home.name})

    assert forked.json()["node"] == other.name
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "node_draining")


async def test_repeated_fork_operation_creates_one_fork():
    async with rig() as fabric:
        home, _ = await start_agent(fabric)
        home.behaviour.lost_replies.add("keep_fork")  # executed, but the reply is lost
        lost = await post(fabric, "alice/fork", **{"as": "bob", "operation": "fork-number-1"})
        home.behaviour.lost_replies.clear()
        again = await post(fabric, "alice/fork", **{"as": "bob", "operation": "fork-number-1"})
        other = await post(fabric, "alice/fork", **{"as": "bob", "operation": "fork-number-2"})

    assert lost.status_code == 503
    assert (again.status_code, again.json()["node"]) == (200, home.name)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "agent_exists")
    assert owned(fabric.nodes) == [("alice", home.name), ("bob", home.name)]


async def test_fork_interrupted_by_a_turn_is_retried_a_bounded_number_of_times():
    async with rig("ab") as fabric:
        _, other = await start_agent(fabric)
        other.behaviour.fail["copy_blocks"] = NotFoundError("the block is no longer here")

        async def heal():
            other.behaviour.fail.clear()

        other.after["abort_migration"] = heal
        healed = await post(fabric, "alice/fork", **{"as": "bob", "to": other.name})
        other.after.clear()
        other.behaviour.fail["copy_blocks"] = NotFoundError("the block is no longer here")
        never = await post(fabric, "alice/fork", **{"as": "carol", "to": other.name})

    assert healed.status_code == 200
    assert (never.status_code, never.json()["error"]["code"]) == (503, "agent_changing")
    assert ("default", "carol") not in other.memory


BAD_FORKS = [
    ("alice", {}, 400, "missing_required_parameter"),
    ("alice", {"as": 3}, 400, "invalid_type"),
    ("alice", {"as": "no spaces"}, 400, "invalid_agent_id"),
    ("alice", {"as": "alice"}, 409, "agent_exists"),
    ("alice", {"as": "bob", "to": "node-z"}, 404, "unknown_node"),
    ("alice", {"as": "bob", "to": 7}, 400, "invalid_type"),
    ("alice", {"as": "bob", "operation": "x"}, 400, "invalid_operation_id"),
    ("nobody", {"as": "bob"}, 404, "unknown_agent"),
]


async def test_copies_reject_bad_input_and_other_tenants():
    async with rig("ab", settings=TWO_TENANTS) as fabric:
        one, two = fabric.http(KEY), fabric.http(OTHER_KEY)
        home, other = await start_agent(fabric, http=one)
        responses = [
            await post(fabric, f"{agent}/fork", one, **body) for agent, body, *_ in BAD_FORKS
        ]
        foreign = [
            await post(fabric, "alice/fork", two, **{"as": "mine"}),
            await post(fabric, "alice/replicate", two, to=other.name),
            await post(fabric, "alice/prefetch", two),
            await two.delete("/v1/agents/alice/prefetch"),
        ]
        theirs = await post(fabric, "alice/replicate", one, to=home.name)
        wrong = await post(fabric, "alice/replicate", one, to=other.name, keep="yes")

    assert [(a.status_code, a.json()["error"]["code"]) for a in responses] == [
        c[2:] for c in BAD_FORKS
    ]
    assert {(a.status_code, a.json()["error"]["code"]) for a in foreign} == {(404, "unknown_agent")}
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (409, "owner_there")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "keep")
    assert owned(fabric.nodes) == [("alice", home.name)]


# --- replicas --------------------------------------------------------------------------------


async def test_kept_replica_follows_turns_and_takes_over():
    async with rig(settings=SOON) as fabric:
        home, other = await start_agent(fabric)
        replica = (await post(fabric, "alice/replicate", to=other.name)).json()
        copied = other.calls["copy_blocks"]
        await fabric.chat(LONG, "x", "y", agent="alice")
        await until(lambda: other.memory["default", "alice"].revision == 2)
        shown = (await fabric.http().get("/v1/agents/alice")).json()
        await home.stop()
        answer = await fabric.chat(LONG, "x", "y", "z", "w", agent="alice")

    assert (replica["owner"], replica["node"], replica["kept"]) == (
        home.name,
        other.name,
        True,
    )
    assert (replica["epoch"], replica["revision"]) == (1, 1)
    assert copied == 1
    assert shown["replicas"] == [other.name]
    assert shown["copies"][0]["current"] is True
    assert shown["copies"][0]["kept"] is True
    assert answer.headers["x-macfabric-node"] == other.name
    assert int(answer.headers["x-macfabric-cached-tokens"]) > len(LONG) + len("<user>y")
    assert int(answer.headers["x-macfabric-epoch"]) >= 2


async def test_replica_count_matches_settings():
    settings = RouterSettings(takeover_after_s=0.3, replicas=2)
    async with rig("abcd", settings=settings, scale=4.0) as fabric:
        home, _ = await start_agent(fabric)

        def copies():
            held = [n for n in fabric.nodes.values() if ("default", "alice") in n.memory]
            return {node.name for node in held if node is not home and not node.is_down}

        await until(lambda: len(copies()) == 2)
        first = copies()
        lost = fabric[min(first)]
        await lost.stop()
        await until(lambda: len(copies()) == 2)
        calls = sum(node.calls["keep_replica"] for node in fabric.nodes.values())
        await fabric.fleet.membership.refresh(relist=True)
        await asyncio.sleep(0.5)
        settled = sum(node.calls["keep_replica"] for node in fabric.nodes.values())

    assert copies() != first
    assert settled == calls == 3, "current copies are left alone"


async def test_failed_copy_is_withdrawn_and_retried_after_rest(monkeypatch):
    monkeypatch.setattr(replicas_module, "REPLICA_RETRY_S", 0.05)
    settings = RouterSettings(takeover_after_s=0.3, replicas=1)
    async with rig("ab", settings=settings, scale=4.0, tended=False) as fabric:
        home, other = await start_agent(fabric)
        other.behaviour.fail["keep_replica"] = NotFoundError("gone", code="no_such_thing")
        await fabric.fleet.membership.refresh(relist=True)
        await fabric.services.replicas.sweep()
        after_failure = dict(other.memory), other.calls["abort_migration"]
        other.behaviour.fail.clear()
        await asyncio.sleep(0.05)
        await fabric.services.replicas.sweep()
        replica_state = other.memory["default", "alice"].state

    assert after_failure == ({}, 1)
    assert replica_state is OwnerState.REPLICA
    assert home.calls["abort_migration"] == 2, "each offer was withdrawn"


async def test_evicted_replica_is_not_recreated_until_agent_changes(
    monkeypatch,
):
    """Otherwise two agents' copies on a disk with room for one would evict each other forever."""
    settings = RouterSettings(takeover_after_s=0.3, replicas=1)
    async with rig("ab", settings=settings, scale=4.0, tended=False) as fabric:
        home, other = await start_agent(fabric)

        async def sweep():
            await fabric.fleet.membership.refresh(relist=True)
            await fabric.services.replicas.sweep()
            return other.calls["keep_replica"]

        copied = await sweep()
        del other.memory["default", "alice"]
        evicted = await sweep()
        await fabric.chat(LONG, "x", "more", agent="alice")
        monkeypatch.setattr(replicas_module, "EVICTED_REPLICA_RETRY_S", 0.0)
        after_a_turn = await sweep()
        del other.memory["default", "alice"]
        later = await sweep()

    assert (copied, evicted, after_a_turn, later) == (1, 1, 2, 3)
    assert ("default", "alice") in home.memory


async def test_erasure_cancels_running_copy():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.5) for letter in "ab"]
    async with rig(nodes=nodes) as fabric:
        home, other = await start_agent(fabric)
        copying = asyncio.create_task(post(fabric, "alice/replicate", to=other.name))
        await until(lambda: other.calls["copy_blocks"] == 1)
        erased = (await fabric.http().delete("/v1/agents/alice")).json()
        refused = await copying

    assert erased["deleted"] is True
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "erased")
    assert home.memory == other.memory == {}


async def test_unnamed_conversation_continues_on_its_owner_not_a_replica():
    async with rig("ab") as fabric:
        first = await fabric.chat(LONG)
        agent, home = first.headers["x-macfabric-agent"], first.headers["x-macfabric-node"]
        for node in fabric.nodes.values():
            if node.name != home:
                await post(fabric, f"{agent}/replicate", to=node.name)
        await fabric.fleet.membership.refresh(relist=True)
        second = await fabric.chat(LONG, "x", "y")

    assert second.headers["x-macfabric-node"] == home
    assert second.headers["x-macfabric-agent"] == agent


# --- prefetch --------------------------------------------------------------------------------


async def test_prefetch_warms_on_owner_and_copies_to_other_nodes():
    async with rig() as fabric:
        home, other = await start_agent(fabric)
        await fabric.http().post(f"/v1/nodes/{home.name}/flush", json={"drop_hot": True})
        loaded = (await post(fabric, "alice/prefetch", to=home.name)).json()
        copied = (await post(fabric, "alice/prefetch", to=other.name)).json()
        cancelled = await fabric.http().delete("/v1/agents/alice/prefetch")
        answer = await fabric.chat(LONG, "x", "y", agent="alice")

    assert (loaded["node"], loaded["tiers"]) == (home.name, ["hot", "disk"])
    assert (copied["node"], copied["kept"]) == (other.name, False)
    assert cancelled.json()["object"] == "agent.prefetch"
    assert answer.headers["x-macfabric-cache"] == "hot"
    assert answer.headers["x-macfabric-node"] == home.name


async def test_request_header_prefetches_next_agent():
    async with rig() as fabric:
        home, _ = await start_agent(fabric)
        await fabric.http().post(f"/v1/nodes/{home.name}/flush", json={"drop_hot": True})
        await fabric.fleet.membership.refresh(relist=True)
        hinting, many = fabric.http(), fabric.http()
        hinting.headers["x-macfabric-prefetch"] = "alice, nobody"
        many.headers["x-macfabric-prefetch"] = "a,b,c,d,e"
        await fabric.chat("hello", agent="bob", http=hinting)
        await until(lambda: home.memory["default", "alice"].hot)
        refused = await fabric.chat("hello", agent="bob", http=many)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-macfabric-prefetch"
