"""An agent with an undecided move waits at its source for its next turn."""

import pytest

from fabric.errors import UNDECIDED, FabricError
from fabric.record.manifest import OwnerState
from router.moves import drains
from tests.router.rig import rig, until
from tests.support.moves import KEY, LONG, begin_turn, migrate

pytestmark = pytest.mark.anyio


async def undecided_move(fabric, tokens_per_s=1000.0):
    """Leave alice's move undecided; return its source."""
    source, target = await begin_turn(fabric)
    source.view_changes = {"prefill_tokens_per_s": tokens_per_s}
    undecided = FabricError("the disk cannot tell", code=UNDECIDED)
    target.behaviour.fail |= {"commit_migration": undecided, "abort_migration": undecided}
    await migrate(fabric, target.name)
    assert source.memory[KEY].state is OwnerState.REPLICA
    target.behaviour.fail.clear()
    return source


def node_of(answer):
    return answer.headers["x-macfabric-node"]


@pytest.mark.parametrize("is_listed", [True, False])
async def test_released_agent_is_served_by_its_last_owner(is_listed):
    async with rig("abc", tended=False) as fabric:
        source = await undecided_move(fabric, tokens_per_s=1.0)
        if is_listed:
            await fabric.fleet.membership.refresh(relist=True)
        found = await fabric.chat(LONG, "x", "y", agent="alice")

    assert node_of(found) == source.name
    assert found.headers["x-macfabric-match"] == "extend"
    assert int(found.headers["x-macfabric-epoch"]) > 2


async def test_released_agent_on_draining_node_is_served_and_migrated(monkeypatch):
    monkeypatch.setattr(drains, "DRAIN_ROUND_PAUSE_S", 0.01)
    monkeypatch.setattr(drains, "DRAIN_RETRY_S", 0.0)
    async with rig("abc", tended=False) as fabric:
        source = await undecided_move(fabric)
        drain = await fabric.services.drains.start(source.name)
        await until(lambda: drain.ended_s is not None)
        stuck = [(key, why.code) for key, why in drain.stuck.items()]
        left_count, state = drain.left_count, drain.state
        new = await fabric.chat(LONG, agent="new")
        found = await fabric.chat(LONG, "x", "y", agent="alice")
        fabric.services.drains.sweep()
        await until(lambda: drain.state is drains.DrainState.DRAINED)
        gone = await fabric.chat(LONG, "x", "y", "z", "w", agent="alice")

    assert (stuck, left_count, state) == ([(KEY, "agent_undecided")], 1, drains.DrainState.STUCK)
    assert node_of(new) != source.name
    assert node_of(found) == source.name
    assert node_of(gone) != source.name
    assert found.headers["x-macfabric-match"] == gone.headers["x-macfabric-match"] == "extend"


async def test_moves_of_released_agent_conflict_as_undecided():
    async with rig("abc", tended=False) as fabric:
        source = await undecided_move(fabric)
        other = next(name for name in fabric.nodes if name != source.name)
        moved = await migrate(fabric, other)
        copied = await fabric.http().post("/v1/agents/alice/fork", json={"as": "bob"})

    for refused in (moved, copied):
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "agent_undecided")


async def test_turn_waits_for_lost_node_of_released_agent():
    async with rig("abc", tended=False) as fabric:
        source = await undecided_move(fabric)
        fabric.services.turns._takeover_after_s = 0.3
        await source.stop()
        found = await fabric.chat(LONG, "x", "y", agent="alice")

    assert found.status_code == 200
    assert node_of(found) != source.name
