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
from tests.support.moves import LONG, begun, migrate, owners

pytestmark = pytest.mark.anyio
WORDS = " ".join(f"w{number}" for number in range(60))


async def streaming_move(made, during=None):
    """Move alice while her answer streams; return the nodes, what was streamed, and the move."""
    source, target = await begun(made)
    source.does.hands_over, source.does.delay_s = True, 0.01
    running = asyncio.create_task(
        made.chat(LONG, "x", WORDS, agent="alice", stream=True, max_tokens=40)
    )
    await until(lambda: source.running)
    moving = asyncio.create_task(migrate(made, target.name))
    if during is not None:
        await during(source, target)
    streamed = await running
    return source, target, streamed.text, await moving


def said(text):
    """Return the words of a streamed answer."""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks).split()


async def test_a_stream_waits_on_the_target_while_the_move_is_committed():
    async with rig("ab") as made:

        async def during(source, target):
            target.does.slow["commit_migration"] = 0.3
            await until(lambda: target.requests)
            assert target.memory == {}, "the turn is there before its agent"
            assert target.requests[0].after is not None

        source, target, text, moved = await streaming_move(made, during)
        events = [each.event for each in made.fleet.events._kept]
        ended = [event for event in events if isinstance(event, TurnEnded)]

    assert (ended[-1].node, ended[-1].outcome) == (target.name, "ok")
    assert moved.status_code == 200
    assert said(text) == WORDS.split()[-40:]
    assert [len(source.requests), len(target.requests)] == [2, 1]
    assert owners(made) == [(target.name, 2)]


async def test_a_turn_given_back_before_its_first_token_is_asked_again_as_one_that_waits_already():
    async with rig("a") as made:
        node = made["node-a"]
        answered = node._answer
        node._answer = lambda asked, text: (
            answered(asked, text) if asked.was_admitted else [HandedOver(None)]
        )
        reply = await made.chat("x", WORDS, agent="alice", max_tokens=40)

    assert reply.status_code == 200
    assert [asked.was_admitted for asked in node.requests] == [False, True]


@pytest.mark.parametrize("amortized_tokens", [0, 7])
async def test_a_turn_asked_again_is_answered_from_the_memory_that_its_client_was_told_of(
    amortized_tokens,
):
    async with rig("a") as made:
        node = made["node-a"]
        answered = node._answer

        node._answer = lambda asked, text: (
            answered(asked, text) if asked.was_admitted else [HandedOver(None)]
        )
        node.does.amortized_tokens = amortized_tokens
        wish = {"edits": "anywhere"}
        reply = await made.chat("x", WORDS, agent="alice", max_tokens=40, macfabric=wish)

    assert reply.status_code == 200
    kept = EditMode.ANYWHERE if amortized_tokens else EditMode.FORGET
    assert [asked.edits for asked in node.requests] == [EditMode.ANYWHERE, kept]


@pytest.mark.parametrize("how", ["refused", "never arrived", "answer lost"])
async def test_a_stream_goes_on_wherever_the_agent_is_after_a_commit_that_failed(how, monkeypatch):
    shorten(monkeypatch, CommitMigration, 0.3)
    async with rig("ab") as made:

        async def during(source, target):
            if how == "refused":
                target.does.fail["commit_migration"] = CorruptDataError("bits")
            elif how == "never arrived":
                target.does.deaf.add("commit_migration")
            else:
                target.does.mute.add("commit_migration")

        source, target, text, moved = await streaming_move(made, during)

    lives_on = target if how == "answer lost" else source
    assert said(text) == WORDS.split()[-40:]
    assert owners(made) == [(lives_on.name, 2 if lives_on is target else 1)]
    assert (moved.status_code == 200) is (lives_on is target)


async def test_a_turn_sent_ahead_is_taken_back_when_the_move_comes_to_nothing():
    """The target never hears of the end of the move, so nobody there would end the wait."""
    async with rig("ab") as made:

        async def during(source, target):
            target.does.fail["commit_migration"] = CorruptDataError("bits")
            target.does.fail["abort_migration"] = CorruptDataError("bits")
            await until(lambda: target.requests)

        _, target, text, moved = await streaming_move(made, during)
        await until(lambda: not made.fleet.ledger.turns(target.name))

    assert moved.status_code >= 400
    assert said(text) == WORDS.split()[-40:]
    assert target.memory == {}


async def test_the_calls_of_the_pause_and_the_turn_find_their_connections_open():
    async with rig("ab") as made:
        source, target, text, moved = await streaming_move(made)

    assert moved.status_code == 200
    assert said(text) == WORDS.split()[-40:]
    assert [source.came_by["seal_agent"]] == source.opened
    assert {target.came_by["commit_migration"], target.came_by["turn"]} == set(target.opened)


async def test_a_move_that_no_stream_waits_for_opens_nothing_ahead():
    async with rig("ab") as made:
        source, target = await begun(made)
        assert (await migrate(made, target.name)).status_code == 200

    assert source.opened == target.opened == []


async def test_a_node_that_opens_nothing_ahead_is_asked_all_the_same(monkeypatch):
    monkeypatch.setattr("router.fleet.node_client.READY_WAIT_S", 0.05)
    async with rig("ab") as made:

        async def hang(_):
            await asyncio.sleep(3600)

        for node in made.nodes.values():
            node.at_opening = hang
        _, target, text, moved = await streaming_move(made)

    assert moved.status_code == 200
    assert said(text) == WORDS.split()[-40:]
    assert owners(made) == [(target.name, 2)]
