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


def post(made, path, http=None, **body):
    return (http or made.http()).post(f"/v1/agents/{path}", json=body)


async def begun(made, agent="alice", **options):
    """Start an agent; return its node and another one."""
    answer = await made.chat(LONG, agent=agent, **options)
    home = made[answer.headers["x-macfabric-node"]]
    return home, next(node for node in made.nodes.values() if node is not home)


# --- forks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
async def test_a_fork_begins_with_all_that_the_agent_knows(where):
    async with rig() as made:
        home, other = await begun(made)
        to = {} if where == "beside" else {"to": other.name}
        forked = (await post(made, "alice/fork", **{"as": "bob"}, **to)).json()
        first = await made.chat(LONG, "x", "to bob", agent="bob")
        mother = await made.chat(LONG, "x", "to alice", agent="alice")
        gone = await made.http().delete("/v1/agents/alice")
        still = await made.chat(LONG, "x", "to bob", "y", "z", agent="bob")

    at = home.name if where == "beside" else other.name
    assert (forked["id"], forked["forked_from"], forked["node"]) == ("bob", "alice", at)
    assert (forked["epoch"], forked["tokens"]) == (1, len(f"<user>{LONG}"))
    assert (forked["blocks_sent"] == 0) is (where == "beside")
    assert first.headers["x-macfabric-node"] == at
    assert first.headers["x-macfabric-match"] == "extend"
    assert int(first.headers["x-macfabric-cached-tokens"]) == len(f"<user>{LONG}")
    assert mother.headers["x-macfabric-match"] == "extend"
    assert gone.json()["deleted"] is True
    assert still.headers["x-macfabric-match"] == "extend"


async def test_a_fork_lands_elsewhere_where_its_node_drains():
    async with rig("ab") as made:
        home, other = await begun(made)
        home.is_draining = True
        forked = await post(made, "alice/fork", **{"as": "bob"})
        refused = await post(made, "alice/fork", **{"as": "carol", "to": home.name})

    assert forked.json()["node"] == other.name
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "node_draining")


async def test_an_operation_makes_one_fork_however_often_it_is_sent():
    async with rig() as made:
        home, _ = await begun(made)
        home.does.mute.add("keep_fork")  # carried out, but the answer is lost
        lost = await post(made, "alice/fork", **{"as": "bob", "operation": "fork-number-1"})
        home.does.mute.clear()
        again = await post(made, "alice/fork", **{"as": "bob", "operation": "fork-number-1"})
        other = await post(made, "alice/fork", **{"as": "bob", "operation": "fork-number-2"})

    assert lost.status_code == 503
    assert (again.status_code, again.json()["node"]) == (200, home.name)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "agent_exists")
    assert owned(made.nodes) == [("alice", home.name), ("bob", home.name)]


async def test_a_fork_that_met_a_turn_is_tried_again_and_not_for_ever():
    async with rig("ab") as made:
        _, other = await begun(made)
        other.does.fail["copy_blocks"] = NotFoundError("the block is no longer here")

        async def heal():
            other.does.fail.clear()

        other.after["abort_migration"] = heal
        healed = await post(made, "alice/fork", **{"as": "bob", "to": other.name})
        other.after.clear()
        other.does.fail["copy_blocks"] = NotFoundError("the block is no longer here")
        never = await post(made, "alice/fork", **{"as": "carol", "to": other.name})

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


async def test_bad_input_and_other_tenants():
    async with rig("ab", settings=TWO_TENANTS) as made:
        one, two = made.http(KEY), made.http(OTHER_KEY)
        home, other = await begun(made, http=one)
        got = [await post(made, f"{who}/fork", one, **body) for who, body, *_ in BAD_FORKS]
        foreign = [
            await post(made, "alice/fork", two, **{"as": "mine"}),
            await post(made, "alice/replicate", two, to=other.name),
            await post(made, "alice/prefetch", two),
            await two.delete("/v1/agents/alice/prefetch"),
        ]
        theirs = await post(made, "alice/replicate", one, to=home.name)
        wrong = await post(made, "alice/replicate", one, to=other.name, keep="yes")

    assert [(a.status_code, a.json()["error"]["code"]) for a in got] == [c[2:] for c in BAD_FORKS]
    assert {(a.status_code, a.json()["error"]["code"]) for a in foreign} == {(404, "unknown_agent")}
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (409, "owner_there")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "keep")
    assert owned(made.nodes) == [("alice", home.name)]


# --- replicas --------------------------------------------------------------------------------


async def test_a_kept_replica_follows_the_turns_and_takes_over():
    async with rig(settings=SOON) as made:
        home, other = await begun(made)
        made_copy = (await post(made, "alice/replicate", to=other.name)).json()
        copied = other.calls["copy_blocks"]
        await made.chat(LONG, "x", "y", agent="alice")
        await until(lambda: other.memory["default", "alice"].revision == 2)
        shown = (await made.http().get("/v1/agents/alice")).json()
        await home.stop()
        answer = await made.chat(LONG, "x", "y", "z", "w", agent="alice")

    assert (made_copy["owner"], made_copy["node"], made_copy["kept"]) == (
        home.name,
        other.name,
        True,
    )
    assert (made_copy["epoch"], made_copy["revision"]) == (1, 1)
    assert copied == 1
    assert shown["replicas"] == [other.name]
    assert shown["copies"][0]["current"] is True
    assert shown["copies"][0]["kept"] is True
    assert answer.headers["x-macfabric-node"] == other.name
    assert int(answer.headers["x-macfabric-cached-tokens"]) > len(LONG) + len("<user>y")
    assert int(answer.headers["x-macfabric-epoch"]) >= 2


async def test_as_many_replicas_as_the_settings_say_and_no_more():
    settings = RouterSettings(takeover_after_s=0.3, replicas=2)
    async with rig("abcd", settings=settings, scale=4.0) as made:
        home, _ = await begun(made)

        def copies():
            held = [n for n in made.nodes.values() if ("default", "alice") in n.memory]
            return {node.name for node in held if node is not home and not node.is_down}

        await until(lambda: len(copies()) == 2)
        first = copies()
        lost = made[min(first)]
        await lost.stop()
        await until(lambda: len(copies()) == 2)
        calls = sum(node.calls["keep_replica"] for node in made.nodes.values())
        await made.fleet.membership.refresh(relist=True)
        await asyncio.sleep(0.5)
        settled = sum(node.calls["keep_replica"] for node in made.nodes.values())

    assert copies() != first
    assert settled == calls == 3, "what is current is left alone"


async def test_a_copy_that_fails_rests_and_goes_elsewhere_without_a_trace(monkeypatch):
    monkeypatch.setattr(replicas_module, "REPLICA_REST_S", 0.05)
    settings = RouterSettings(takeover_after_s=0.3, replicas=1)
    async with rig("ab", settings=settings, scale=4.0, tended=False) as made:
        home, other = await begun(made)
        other.does.fail["keep_replica"] = NotFoundError("gone", code="no_such_thing")
        await made.fleet.membership.refresh(relist=True)
        await made.services.replicas.sweep()
        after_failure = dict(other.memory), other.calls["abort_migration"]
        other.does.fail.clear()
        await asyncio.sleep(0.05)
        await made.services.replicas.sweep()
        is_copied = other.memory["default", "alice"].state

    assert after_failure == ({}, 1)
    assert is_copied is OwnerState.REPLICA
    assert home.calls["abort_migration"] == 2, "each offer was withdrawn"


async def test_a_copy_that_a_full_node_evicts_is_not_made_again_until_there_is_something_new(
    monkeypatch,
):
    """Else two agents' copies on a disk with room for one would push each other out for ever."""
    settings = RouterSettings(takeover_after_s=0.3, replicas=1)
    async with rig("ab", settings=settings, scale=4.0, tended=False) as made:
        home, other = await begun(made)

        async def swept():
            await made.fleet.membership.refresh(relist=True)
            await made.services.replicas.sweep()
            return other.calls["keep_replica"]

        copied = await swept()
        del other.memory["default", "alice"]
        evicted = await swept()
        await made.chat(LONG, "x", "more", agent="alice")
        monkeypatch.setattr(replicas_module, "REPLICA_AGAIN_S", 0.0)
        after_a_turn = await swept()
        del other.memory["default", "alice"]
        later = await swept()

    assert (copied, evicted, after_a_turn, later) == (1, 1, 2, 3)
    assert ("default", "alice") in home.memory


async def test_an_erasure_ends_the_copy_under_way_and_leaves_none():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.5) for letter in "ab"]
    async with rig(nodes=nodes) as made:
        home, other = await begun(made)
        copying = asyncio.create_task(post(made, "alice/replicate", to=other.name))
        await until(lambda: other.calls["copy_blocks"] == 1)
        erased = (await made.http().delete("/v1/agents/alice")).json()
        refused = await copying

    assert erased["deleted"] is True
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "erased")
    assert home.memory == other.memory == {}


async def test_an_unnamed_conversation_goes_on_with_its_owner_not_with_a_copy():
    async with rig("ab") as made:
        first = await made.chat(LONG)
        agent, home = first.headers["x-macfabric-agent"], first.headers["x-macfabric-node"]
        for node in made.nodes.values():
            if node.name != home:
                await post(made, f"{agent}/replicate", to=node.name)
        await made.fleet.membership.refresh(relist=True)
        second = await made.chat(LONG, "x", "y")

    assert second.headers["x-macfabric-node"] == home
    assert second.headers["x-macfabric-agent"] == agent


# --- prefetch --------------------------------------------------------------------------------


async def test_prefetch_heats_at_home_and_copies_elsewhere():
    async with rig() as made:
        home, other = await begun(made)
        await made.http().post(f"/v1/nodes/{home.name}/flush", json={"drop_hot": True})
        loaded = (await post(made, "alice/prefetch", to=home.name)).json()
        copied = (await post(made, "alice/prefetch", to=other.name)).json()
        cancelled = await made.http().delete("/v1/agents/alice/prefetch")
        answer = await made.chat(LONG, "x", "y", agent="alice")

    assert (loaded["node"], loaded["tiers"]) == (home.name, ["hot", "disk"])
    assert (copied["node"], copied["kept"]) == (other.name, False)
    assert cancelled.json()["object"] == "agent.prefetch"
    assert answer.headers["x-macfabric-cache"] == "hot"
    assert answer.headers["x-macfabric-node"] == home.name


async def test_a_request_may_say_who_is_next():
    async with rig() as made:
        home, _ = await begun(made)
        await made.http().post(f"/v1/nodes/{home.name}/flush", json={"drop_hot": True})
        await made.fleet.membership.refresh(relist=True)
        hinting, many = made.http(), made.http()
        hinting.headers["x-macfabric-prefetch"] = "alice, nobody"
        many.headers["x-macfabric-prefetch"] = "a,b,c,d,e"
        await made.chat("hello", agent="bob", http=hinting)
        await until(lambda: home.memory["default", "alice"].hot)
        refused = await made.chat("hello", agent="bob", http=many)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-macfabric-prefetch"
