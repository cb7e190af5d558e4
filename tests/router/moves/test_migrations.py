import asyncio

import pytest

from fabric.control.node_calls import CommitMigration
from fabric.errors import (
    UNDECIDED,
    ConflictError,
    CorruptDataError,
    FabricError,
    RetryLaterError,
)
from fabric.record.manifest import OwnerState
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, shorten, until
from tests.support.moves import KEY, LONG, begin_turn, migrate, owners

pytestmark = pytest.mark.anyio


async def test_migration_moves_agent_with_its_cache():
    async with rig() as fabric:
        source, target = await begin_turn(fabric)
        moved = await migrate(fabric, target.name)
        after = await fabric.chat(LONG, "x", "y", agent="alice")
        shown = (await fabric.http().get("/v1/agents/alice")).json()

    body = moved.json()
    assert moved.status_code == 200
    assert (body["from"], body["to"], body["epoch"]) == (source.name, target.name, 2)
    assert body["blocks_sent"] == -(-len(f"<user>{LONG}") // 64)
    assert body["blocks_reused"] == 0
    assert body["bytes_sent"] == 100 * body["blocks_sent"]
    assert 0 <= body["pause_seconds"] <= body["seconds"] < 5
    assert after.headers["x-macfabric-node"] == target.name
    assert after.headers["x-macfabric-match"] == "extend"
    assert after.headers["x-macfabric-cache"] == "disk"
    assert (shown["owner"], shown["epoch"]) == (target.name, 2)
    assert shown["replicas"] == [source.name]
    assert source.memory[KEY].state is OwnerState.REPLICA


async def test_migration_back_sends_only_new_blocks():
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        await migrate(fabric, target.name)
        await fabric.chat(LONG, "x", "z" * 640, agent="alice")
        back = (await migrate(fabric, source.name)).json()

    assert back["epoch"] == 3
    assert 0 < back["blocks_sent"] <= 12
    assert back["blocks_reused"] >= 70


async def test_migration_to_owner_is_a_no_op():
    async with rig() as fabric:
        source, _ = await begin_turn(fabric)
        moved = (await migrate(fabric, source.name)).json()
        metrics = (await fabric.http().get("/metrics")).text

    assert moved == {
        "id": "alice",
        "from": source.name,
        "to": source.name,
        "epoch": 1,
        "blocks_sent": 0,
        "blocks_reused": 0,
        "bytes_sent": 0,
        "seconds": 0.0,
        "pause_seconds": 0.0,
    }
    assert source.calls["seal_agent"] == 0
    assert 'outcome="committed"' not in metrics


async def test_migration_rejects_unknown_node_or_agent():
    async with rig("ab") as fabric:
        await begin_turn(fabric)
        node = await migrate(fabric, "node-z")
        agent = await migrate(fabric, "node-a", agent="bob")
        malformed = await fabric.http().post("/v1/agents/alice/migrate", json={"to": 3})
        missing = await fabric.http().post("/v1/agents/alice/migrate", json={})

    assert node.status_code == agent.status_code == 404
    assert node.json()["error"]["code"] == "unknown_node"
    assert "node-a, node-b" in node.json()["error"]["message"]
    assert agent.json()["error"]["code"] == "unknown_agent"
    assert malformed.json()["error"]["param"] == missing.json()["error"]["param"] == "to"


async def test_concurrent_migrations_of_one_agent_conflict():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.2) for letter in "abc"]
    async with rig(nodes=nodes) as fabric:
        source, target = await begin_turn(fabric)
        third = next(n for n in fabric.nodes.values() if n not in (source, target))
        answers = await asyncio.gather(migrate(fabric, target.name), migrate(fabric, third.name))

    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200, 409]
    refused = next(answer for answer in answers if answer.status_code == 409)
    assert refused.json()["error"]["code"] == "migration_in_progress"


async def test_agent_serves_during_copy_and_waits_during_seal():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.3) for letter in "ab"]
    async with rig(nodes=nodes) as fabric:
        source, target = await begin_turn(fabric)
        moving = asyncio.create_task(migrate(fabric, target.name))
        await until(lambda: target.calls["copy_blocks"] == 1)
        during = await fabric.chat(LONG, "x", "y", agent="alice")
        assert not moving.done()
        await until(lambda: target.calls["commit_migration"])
        sealed = await fabric.chat(LONG, "x", "y", "z", "w", agent="alice")
        moved = (await moving).json()

    assert during.headers["x-macfabric-node"] == source.name
    assert sealed.headers["x-macfabric-node"] == target.name
    assert sealed.headers["x-macfabric-match"] == "extend", "it includes the turn during the copy"
    assert 0.25 <= moved["pause_seconds"] < moved["seconds"]


async def test_source_without_handover_finishes_its_turn_first():
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        source.behaviour.delay_s = 0.01
        running = asyncio.create_task(
            fabric.chat(LONG, "x", "y", agent="alice", stream=True, max_tokens=40)
        )
        await until(lambda: source.running)
        moved = await migrate(fabric, target.name)
        streamed = await running

    assert moved.status_code == 200
    assert "[DONE]" in streamed.text
    assert source.calls["seal_agent"] > 1
    assert moved.json()["pause_seconds"] < 0.2 < moved.json()["seconds"]
    assert target.memory[KEY].text.endswith("<assistant>x<user>y")


async def test_seal_waits_for_turn_of_another_router():
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        source.memory[KEY].busy += 1
        moving = asyncio.create_task(migrate(fabric, target.name))
        await until(lambda: source.calls["seal_agent"] > 1)
        assert not moving.done()
        source.memory[KEY].busy -= 1
        moved = await moving

    assert moved.status_code == 200


STEPS = ["offer_migration", "copy_blocks", "seal_agent", "commit_migration"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error", [CorruptDataError("bits"), ConflictError("no"), RetryLaterError("full")]
)
async def test_failed_step_leaves_source_serving(step, error, monkeypatch):
    monkeypatch.setattr("router.moves.migration.SEAL_WAIT_S", 0.0)
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        (source if step in ("offer_migration", "seal_agent") else target).behaviour.fail[step] = (
            error
        )
        moved = await migrate(fabric, target.name)
        after = await fabric.chat(LONG, "x", "y", agent="alice")
        claims = owners(fabric)
        metrics = (await fabric.http().get("/metrics")).text

    assert moved.status_code == error.status
    assert after.headers["x-macfabric-node"] == source.name
    assert after.headers["x-macfabric-match"] == "extend"
    assert claims == [(source.name, 1)]
    assert 'macfabric_migrations_total{outcome="aborted"} 1.0' in metrics


async def test_epoch_of_failed_commit_is_not_reused():
    async with rig("abc") as fabric:
        source, target = await begin_turn(fabric)
        third = next(node for node in fabric.nodes.values() if node not in (source, target))
        target.behaviour.fail["commit_migration"] = FabricError("the disk refused")
        failed = await migrate(fabric, target.name)
        moved = await migrate(fabric, third.name)

    assert failed.status_code == 500
    assert moved.json()["epoch"] == 3


async def test_undecided_target_leaves_no_owner_at_a_lower_epoch():
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        undecided = FabricError("the disk cannot tell", code=UNDECIDED)
        target.behaviour.fail |= {"commit_migration": undecided, "abort_migration": undecided}
        failed = await migrate(fabric, target.name)
        stepped_down = source.memory[KEY]
        seen = stepped_down.state, stepped_down.epoch
        after = await fabric.chat(LONG, "x", "y", agent="alice")

    assert failed.status_code == 500
    assert seen == (OwnerState.REPLICA, 2)
    assert int(after.headers["x-macfabric-epoch"]) > 2
    assert after.headers["x-macfabric-match"] == "extend"


async def test_corrupt_block_makes_source_verify_its_blocks():
    """Verify once only: a second corruption is not the source's fault."""
    verify_flags = []

    class Source(FakeNode):
        def _offer(self, call):
            verify_flags.append(call.verify)
            offer = super()._offer(call)
            target.behaviour.fail.pop("copy_blocks", None) if call.verify else None
            return offer

    source = Source("node-a")
    target = FakeNode("node-b")
    async with rig(nodes=[source, target]) as fabric:
        target.is_draining = True
        await fabric.chat(LONG, agent="alice")
        target.is_draining = False
        target.behaviour.fail["copy_blocks"] = CorruptDataError("bits")
        moved = await migrate(fabric, target.name)

    assert moved.status_code == 200
    assert verify_flags[:2] == [False, True]


@pytest.mark.parametrize("step", [*STEPS, "release_agent", "abort_migration"])
@pytest.mark.parametrize("side", ["source", "target"])
async def test_node_death_at_any_step_leaves_one_owner(step, side):
    async with rig("abc", scale=4.0) as fabric:
        source, target = await begin_turn(fabric)
        dying = source if side == "source" else target
        for node in (source, target):
            node.after[step] = dying.stop
        await migrate(fabric, target.name)
        after = await fabric.chat(LONG, "x", "y", agent="alice")
        for node in (source, target):
            node.after.clear()
        if dying.is_down:
            await dying.restart()
        await until(lambda: len(owners(fabric)) == 1, 10)
        final = await fabric.chat(LONG, "x", "y", agent="alice")

    assert after.status_code == final.status_code == 200
    assert int(final.headers["x-macfabric-cached-tokens"]) > 0


async def test_commit_with_lost_reply_counts_if_applied():
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        target.behaviour.lost_replies.add("commit_migration")
        moved = await migrate(fabric, target.name)
        after = await fabric.chat(LONG, "x", "y", agent="alice")

    assert moved.status_code == 200
    assert moved.json()["epoch"] == 2
    assert owners(fabric) == [(target.name, 2)]
    assert after.headers["x-macfabric-node"] == target.name
    assert source.memory[KEY].state is OwnerState.REPLICA


async def test_lost_commit_is_aborted_on_both_nodes(monkeypatch):
    shorten(monkeypatch, CommitMigration, 0.2)
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        target.behaviour.dropped_calls.add("commit_migration")
        moved = await migrate(fabric, target.name)
        after = await fabric.chat(LONG, "x", "y", agent="alice")

    assert moved.status_code == 503
    assert owners(fabric) == [(source.name, 1)]
    assert target.aborted, "a commit still on its way would be refused"
    assert after.headers["x-macfabric-node"] == source.name


@pytest.mark.parametrize("is_listed", [False, True])
async def test_failed_release_is_retried(is_listed):
    """This includes a sealed source that was already listed and is not listed again."""
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        if is_listed:
            target.after["commit_migration"] = fabric.fleet.membership.refresh
        source.behaviour.fail["release_agent"] = RetryLaterError("busy")
        moved = await migrate(fabric, target.name)
        assert source.memory[KEY].state is OwnerState.SEALED
        del source.behaviour.fail["release_agent"]
        await until(lambda: source.memory[KEY].state is OwnerState.REPLICA)

    assert moved.status_code == 200
    assert owners(fabric) == [(target.name, 2)]


async def test_release_is_retried_after_target_dies():
    async with rig("ab", scale=4.0) as fabric:
        source, target = await begin_turn(fabric)

        async def list_and_die():
            membership = fabric.fleet.membership
            await membership.heartbeat(membership.find(source.name))
            await target.stop()

        target.after["commit_migration"] = list_and_die
        source.behaviour.fail["release_agent"] = RetryLaterError("busy")
        moved = await migrate(fabric, target.name)
        assert source.memory[KEY].state is OwnerState.SEALED
        source.behaviour.fail.clear()
        await until(lambda: source.memory[KEY].state is OwnerState.REPLICA)

    assert moved.status_code == 503
    assert source.memory[KEY].epoch == 2


async def test_migration_continues_when_client_disconnects():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.2) for letter in "ab"]
    async with rig(nodes=nodes) as fabric:
        _, target = await begin_turn(fabric)
        asking = asyncio.create_task(migrate(fabric, target.name))
        await until(lambda: target.calls["copy_blocks"])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: owners(fabric) == [(target.name, 2)])


async def test_stopping_router_aborts_running_migration():
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        target.behaviour.slow["commit_migration"] = 30.0
        asking = asyncio.create_task(migrate(fabric, target.name))
        await until(lambda: source.memory[KEY].state is OwnerState.SEALED)
        fabric.tending.cancel()
        await asyncio.gather(fabric.tending, return_exceptions=True)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    assert owners(fabric) == [(source.name, 1)]


async def test_silent_node_is_not_a_migration_target():
    async with rig("ab", scale=4.0) as fabric:
        source, target = await begin_turn(fabric)
        target.behaviour.hang = True
        await until(lambda: not fabric.fleet.is_up(target.name))
        moved = await migrate(fabric, target.name)

    assert moved.status_code == 503
    assert source.calls["offer_migration"] == 0


async def test_stale_epoch_is_refreshed_for_next_migration():
    async with rig("ab", tended=False) as fabric:
        source, target = await begin_turn(fabric)
        await fabric.fleet.membership.refresh()
        source.memory[KEY].epoch = 7  # unlisted: its counter did not move
        refused = await migrate(fabric, target.name)
        source.changes += 1
        moved = await migrate(fabric, target.name)

    assert refused.status_code == 503
    assert moved.json()["epoch"] == 8
