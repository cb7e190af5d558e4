"""An agent that moves while its answer streams: the turn is sent ahead to the target."""

import asyncio
import json

import pytest

from fabric.control.node_calls import CommitMigration
from fabric.edit_mode import EditMode
from fabric.errors import CorruptDataError
from fabric.turn.generation import HandedOver
from router.events import TurnEnded
from tests.router.rig import rig, shorten, until
from tests.support.moves import LONG, begin_turn, migrate, owners

pytestmark = pytest.mark.anyio
WORDS = " ".join(f"w{number}" for number in range(60))


async def streaming_move(fabric, during=None):
    """Move alice while her answer streams; return the nodes, the streamed text and the move."""
    source, target = await begin_turn(fabric)
    source.behaviour.hands_over, source.behaviour.delay_s = True, 0.01
    running = asyncio.create_task(
        fabric.chat(LONG, "x", WORDS, agent="alice", stream=True, max_tokens=40)
    )
    await until(lambda: source.running)
    moving = asyncio.create_task(migrate(fabric, target.name))
    if during is not None:
        await during(source, target)
    streamed = await running
    return source, target, streamed.text, await moving


def streamed_words(text):
    """Return the words of a streamed answer."""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks).split()


async def test_streaming_turn_waits_on_target_during_commit():
    async with rig("ab") as fabric:

        async def during(source, target):
            target.behaviour.slow["commit_migration"] = 0.3
            await until(lambda: target.requests)
            assert target.memory == {}, "the turn arrives before its agent"
            assert target.requests[0].after is not None

        source, target, text, moved = await streaming_move(fabric, during)
        events = [each.event for each in fabric.fleet.events._kept]
        ended = [event for event in events if isinstance(event, TurnEnded)]

    assert (ended[-1].node, ended[-1].outcome) == (target.name, "ok")
    assert moved.status_code == 200
    assert streamed_words(text) == WORDS.split()[-40:]
    assert [len(source.requests), len(target.requests)] == [2, 1]
    assert owners(fabric) == [(target.name, 2)]


async def test_turn_handed_over_before_first_token_is_resent_as_admitted():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        answer = node._answer
        node._answer = lambda request, text: (
            answer(request, text) if request.was_admitted else [HandedOver(None)]
        )
        reply = await fabric.chat("x", WORDS, agent="alice", max_tokens=40)

    assert reply.status_code == 200
    assert [request.was_admitted for request in node.requests] == [False, True]


@pytest.mark.parametrize("amortized_tokens", [0, 7])
async def test_resent_turn_uses_the_reported_edit_mode(
    amortized_tokens,
):
    async with rig("a") as fabric:
        node = fabric["node-a"]
        answer = node._answer

        node._answer = lambda request, text: (
            answer(request, text) if request.was_admitted else [HandedOver(None)]
        )
        node.behaviour.amortized_tokens = amortized_tokens
        wish = {"edits": "anywhere"}
        reply = await fabric.chat("x", WORDS, agent="alice", max_tokens=40, macfabric=wish)

    assert reply.status_code == 200
    kept = EditMode.ANYWHERE if amortized_tokens else EditMode.FORGET
    assert [request.edits for request in node.requests] == [EditMode.ANYWHERE, kept]


@pytest.mark.parametrize("how", ["refused", "never arrived", "answer lost"])
async def test_stream_continues_on_actual_owner_after_failed_commit(how, monkeypatch):
    shorten(monkeypatch, CommitMigration, 0.3)
    async with rig("ab") as fabric:

        async def during(source, target):
            if how == "refused":
                target.behaviour.fail["commit_migration"] = CorruptDataError("bits")
            elif how == "never arrived":
                target.behaviour.dropped_calls.add("commit_migration")
            else:
                target.behaviour.lost_replies.add("commit_migration")

        source, target, text, moved = await streaming_move(fabric, during)

    lives_on = target if how == "answer lost" else source
    assert streamed_words(text) == WORDS.split()[-40:]
    assert owners(fabric) == [(lives_on.name, 2 if lives_on is target else 1)]
    assert (moved.status_code == 200) is (lives_on is target)


async def test_turn_sent_ahead_is_cancelled_when_move_fails():
    """The target gets no notice of the failed move, so the turn would wait forever."""
    async with rig("ab") as fabric:

        async def during(source, target):
            target.behaviour.fail["commit_migration"] = CorruptDataError("bits")
            target.behaviour.fail["abort_migration"] = CorruptDataError("bits")
            await until(lambda: target.requests)

        _, target, text, moved = await streaming_move(fabric, during)
        await until(lambda: not fabric.fleet.ledger.turns(target.name))

    assert moved.status_code >= 400
    assert streamed_words(text) == WORDS.split()[-40:]
    assert target.memory == {}


async def test_move_calls_and_turn_use_connections_opened_ahead():
    async with rig("ab") as fabric:
        source, target, text, moved = await streaming_move(fabric)

    assert moved.status_code == 200
    assert streamed_words(text) == WORDS.split()[-40:]
    assert [source.ports["seal_agent"]] == source.opened
    assert {target.ports["commit_migration"], target.ports["turn"]} == set(target.opened)


async def test_move_without_stream_opens_no_connections_ahead():
    async with rig("ab") as fabric:
        source, target = await begin_turn(fabric)
        assert (await migrate(fabric, target.name)).status_code == 200

    assert source.opened == target.opened == []


async def test_node_that_never_opens_ahead_is_still_called(monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.READY_WAIT_S", 0.05)
    async with rig("ab") as fabric:

        async def hang(_):
            await asyncio.sleep(3600)

        for node in fabric.nodes.values():
            node.at_opening = hang
        _, target, text, moved = await streaming_move(fabric)

    assert moved.status_code == 200
    assert streamed_words(text) == WORDS.split()[-40:]
    assert owners(fabric) == [(target.name, 2)]
