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
from tests.support.moves import KEY, LONG, begun, migrate, owners

pytestmark = pytest.mark.anyio


async def test_moves_an_agent_with_its_memory():
    async with rig() as made:
        source, target = await begun(made)
        moved = await migrate(made, target.name)
        after = await made.chat(LONG, "x", "y", agent="alice")
        shown = (await made.http().get("/v1/agents/alice")).json()

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


async def test_a_move_back_sends_only_new_blocks():
    async with rig("ab") as made:
        source, target = await begun(made)
        await migrate(made, target.name)
        await made.chat(LONG, "x", "z" * 640, agent="alice")
        back = (await migrate(made, source.name)).json()

    assert back["epoch"] == 3
    assert 0 < back["blocks_sent"] <= 12
    assert back["blocks_reused"] >= 70


async def test_a_move_to_the_owner_changes_nothing():
    async with rig() as made:
        source, _ = await begun(made)
        moved = (await migrate(made, source.name)).json()
        metrics = (await made.http().get("/metrics")).text

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


async def test_unknown_names():
    async with rig("ab") as made:
        await begun(made)
        node = await migrate(made, "node-z")
        agent = await migrate(made, "node-a", agent="bob")
        malformed = await made.http().post("/v1/agents/alice/migrate", json={"to": 3})
        missing = await made.http().post("/v1/agents/alice/migrate", json={})

    assert node.status_code == agent.status_code == 404
    assert node.json()["error"]["code"] == "unknown_node"
    assert "node-a, node-b" in node.json()["error"]["message"]
    assert agent.json()["error"]["code"] == "unknown_agent"
    assert malformed.json()["error"]["param"] == missing.json()["error"]["param"] == "to"


async def test_one_move_of_an_agent_at_a_time():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.2) for letter in "abc"]
    async with rig(nodes=nodes) as made:
        source, target = await begun(made)
        third = next(n for n in made.nodes.values() if n not in (source, target))
        answers = await asyncio.gather(migrate(made, target.name), migrate(made, third.name))

    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200, 409]
    refused = next(answer for answer in answers if answer.status_code == 409)
    assert refused.json()["error"]["code"] == "migration_in_progress"


async def test_the_agent_serves_while_it_is_copied_and_waits_while_it_is_sealed():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.3) for letter in "ab"]
    async with rig(nodes=nodes) as made:
        source, target = await begun(made)
        moving = asyncio.create_task(migrate(made, target.name))
        await until(lambda: target.calls["copy_blocks"] == 1)
        during = await made.chat(LONG, "x", "y", agent="alice")
        assert not moving.done()
        await until(lambda: target.calls["commit_migration"])
        sealed = await made.chat(LONG, "x", "y", "z", "w", agent="alice")
        moved = (await moving).json()

    assert during.headers["x-macfabric-node"] == source.name
    assert sealed.headers["x-macfabric-node"] == target.name
    assert sealed.headers["x-macfabric-match"] == "extend", "the turn during the copy came along"
    assert 0.25 <= moved["pause_seconds"] < moved["seconds"]


async def test_a_source_that_cannot_hand_its_turn_over_finishes_it_first():
    async with rig("ab") as made:
        source, target = await begun(made)
        source.does.delay_s = 0.01
        running = asyncio.create_task(
            made.chat(LONG, "x", "y", agent="alice", stream=True, max_tokens=40)
        )
        await until(lambda: source.running)
        moved = await migrate(made, target.name)
        streamed = await running

    assert moved.status_code == 200
    assert "[DONE]" in streamed.text
    assert source.calls["seal_agent"] > 1
    assert moved.json()["pause_seconds"] < 0.2 < moved.json()["seconds"]
    assert target.memory[KEY].text.endswith("<assistant>x<user>y")


async def test_a_turn_of_another_router_ends_before_the_seal():
    async with rig("ab") as made:
        source, target = await begun(made)
        source.memory[KEY].busy += 1
        moving = asyncio.create_task(migrate(made, target.name))
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
async def test_a_failed_step_leaves_the_source_serving(step, error, monkeypatch):
    monkeypatch.setattr("router.moves.migration.SEAL_WAIT_S", 0.0)
    async with rig("ab") as made:
        source, target = await begun(made)
        (source if step in ("offer_migration", "seal_agent") else target).does.fail[step] = error
        moved = await migrate(made, target.name)
        after = await made.chat(LONG, "x", "y", agent="alice")
        claims = owners(made)
        metrics = (await made.http().get("/metrics")).text

    assert moved.status_code == error.status
    assert after.headers["x-macfabric-node"] == source.name
    assert after.headers["x-macfabric-match"] == "extend"
    assert claims == [(source.name, 1)]
    assert 'macfabric_migrations_total{outcome="aborted"} 1.0' in metrics


async def test_the_epoch_of_a_failed_commit_is_not_reused():
    async with rig("abc") as made:
        source, target = await begun(made)
        third = next(node for node in made.nodes.values() if node not in (source, target))
        target.does.fail["commit_migration"] = FabricError("the disk refused")
        failed = await migrate(made, target.name)
        moved = await migrate(made, third.name)

    assert failed.status_code == 500
    assert moved.json()["epoch"] == 3


async def test_an_undecided_target_leaves_no_owner_at_a_lower_epoch():
    async with rig("ab") as made:
        source, target = await begun(made)
        undecided = FabricError("the disk cannot tell", code=UNDECIDED)
        target.does.fail |= {"commit_migration": undecided, "abort_migration": undecided}
        failed = await migrate(made, target.name)
        stepped_down = source.memory[KEY]
        seen = stepped_down.state, stepped_down.epoch
        after = await made.chat(LONG, "x", "y", agent="alice")

    assert failed.status_code == 500
    assert seen == (OwnerState.REPLICA, 2)
    assert int(after.headers["x-macfabric-epoch"]) > 2
    assert after.headers["x-macfabric-match"] == "extend"


async def test_a_damaged_block_makes_the_source_verify_its_blocks():
    """Only once: a second damage is not the source's fault."""
    asked = []

    class Source(FakeNode):
        def _offer(self, call):
            asked.append(call.verify)
            made = super()._offer(call)
            target.does.fail.pop("copy_blocks", None) if call.verify else None
            return made

    source = Source("node-a")
    target = FakeNode("node-b")
    async with rig(nodes=[source, target]) as made:
        target.is_draining = True
        await made.chat(LONG, agent="alice")
        target.is_draining = False
        target.does.fail["copy_blocks"] = CorruptDataError("bits")
        moved = await migrate(made, target.name)

    assert moved.status_code == 200
    assert asked[:2] == [False, True]


@pytest.mark.parametrize("step", [*STEPS, "release_agent", "abort_migration"])
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_node_that_dies_at_a_step_leaves_one_owner(step, side):
    async with rig("abc", scale=4.0) as made:
        source, target = await begun(made)
        dying = source if side == "source" else target
        for node in (source, target):
            node.after[step] = dying.stop
        await migrate(made, target.name)
        after = await made.chat(LONG, "x", "y", agent="alice")
        for node in (source, target):
            node.after.clear()
        if dying.is_down:
            await dying.restart()
        await until(lambda: len(owners(made)) == 1, 10)
        final = await made.chat(LONG, "x", "y", agent="alice")

    assert after.status_code == final.status_code == 200
    assert int(final.headers["x-macfabric-cached-tokens"]) > 0


async def test_a_commit_whose_answer_is_lost_counts_if_it_happened():
    async with rig("ab") as made:
        source, target = await begun(made)
        target.does.mute.add("commit_migration")
        moved = await migrate(made, target.name)
        after = await made.chat(LONG, "x", "y", agent="alice")

    assert moved.status_code == 200
    assert moved.json()["epoch"] == 2
    assert owners(made) == [(target.name, 2)]
    assert after.headers["x-macfabric-node"] == target.name
    assert source.memory[KEY].state is OwnerState.REPLICA


async def test_a_commit_that_never_arrived_is_aborted_at_both(monkeypatch):
    shorten(monkeypatch, CommitMigration, 0.2)
    async with rig("ab") as made:
        source, target = await begun(made)
        target.does.deaf.add("commit_migration")
        moved = await migrate(made, target.name)
        after = await made.chat(LONG, "x", "y", agent="alice")

    assert moved.status_code == 503
    assert owners(made) == [(source.name, 1)]
    assert target.aborted, "a commit still on its way would be refused"
    assert after.headers["x-macfabric-node"] == source.name


@pytest.mark.parametrize("is_listed", [False, True])
async def test_a_lost_release_is_repeated(is_listed):
    """Also if the sealed source was listed already, and is not listed again."""
    async with rig("ab") as made:
        source, target = await begun(made)
        if is_listed:
            target.after["commit_migration"] = made.fleet.membership.refresh
        source.does.fail["release_agent"] = RetryLaterError("busy")
        moved = await migrate(made, target.name)
        assert source.memory[KEY].state is OwnerState.SEALED
        del source.does.fail["release_agent"]
        await until(lambda: source.memory[KEY].state is OwnerState.REPLICA)

    assert moved.status_code == 200
    assert owners(made) == [(target.name, 2)]


async def test_a_source_that_cannot_release_is_asked_again():
    async with rig("ab", scale=4.0) as made:
        source, target = await begun(made)

        async def list_and_die():
            membership = made.fleet.membership
            await membership.heartbeat(membership.find(source.name))
            await target.stop()

        target.after["commit_migration"] = list_and_die
        source.does.fail["release_agent"] = RetryLaterError("busy")
        moved = await migrate(made, target.name)
        assert source.memory[KEY].state is OwnerState.SEALED
        source.does.fail.clear()
        await until(lambda: source.memory[KEY].state is OwnerState.REPLICA)

    assert moved.status_code == 503
    assert source.memory[KEY].epoch == 2


async def test_a_move_continues_when_its_caller_leaves():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.2) for letter in "ab"]
    async with rig(nodes=nodes) as made:
        _, target = await begun(made)
        asking = asyncio.create_task(migrate(made, target.name))
        await until(lambda: target.calls["copy_blocks"])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: owners(made) == [(target.name, 2)])


async def test_a_router_that_stops_during_a_move_aborts_it():
    async with rig("ab") as made:
        source, target = await begun(made)
        target.does.slow["commit_migration"] = 30.0
        asking = asyncio.create_task(migrate(made, target.name))
        await until(lambda: source.memory[KEY].state is OwnerState.SEALED)
        made.tending.cancel()
        await asyncio.gather(made.tending, return_exceptions=True)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    assert owners(made) == [(source.name, 1)]


async def test_a_silent_node_is_neither_source_nor_target():
    async with rig("ab", scale=4.0) as made:
        source, target = await begun(made)
        target.does.hang = True
        await until(lambda: not made.fleet.is_up(target.name))
        moved = await migrate(made, target.name)

    assert moved.status_code == 503
    assert source.calls["offer_migration"] == 0


async def test_a_move_with_a_stale_epoch_refreshes_once():
    async with rig("ab", tended=False) as made:
        source, target = await begun(made)
        await made.fleet.membership.refresh()
        source.memory[KEY].epoch = 7  # unlisted: its counter did not move
        refused = await migrate(made, target.name)
        source.changes += 1
        moved = await migrate(made, target.name)

    assert refused.status_code == 503
    assert moved.json()["epoch"] == 8
