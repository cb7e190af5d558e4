"""A turn sent ahead to a move's target applies the agent's directives, old and new."""

import asyncio

from fabric.control.directive_calls import DirectAgent
from fabric.edit_mode import EditMode
from fabric.ids import AgentId, OperationId
from fabric.record.directive import Directive
from fabric.record.message_positions import message_digest
from fabric.record.spans import WantedSpan
from fabric.settings import NodeSettings
from fabric.turn.generation import Sampling
from fabric.turn.messages import Message, MessageRole
from tests.sim import oracle
from tests.sim.script import Talk, play

MIB = 1 << 20
SETTINGS = NodeSettings(hot_bytes=MIB, disk_bytes=64 * MIB)
ALICE = AgentId("alice")
SAMPLING = Sampling(max_tokens=8, ignore_eos=True)
STEP_S, STEPS = 0.01, 8
MID_ANSWER_S = 0.3


def test_turn_sent_ahead_of_a_move_applies_directives():
    async def live(world):
        alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
        await alice.say("a secret")
        assert await alice.say("two")
        secret = Message(MessageRole.USER, ("a secret",))
        directive = Directive(
            OperationId("operation-1"),
            EditMode.FORGET,
            "nothing",
            message_digest=message_digest(secret),
        )
        await services.fleet.ask_owner(DirectAgent(*alice.key, (directive,)))
        for step in range(STEPS):
            source = alice.last.node
            target = min(world.nodes.keys() - {source})
            moving = asyncio.create_task(services.moves.migrate(*alice.key, target))
            await asyncio.sleep(step * STEP_S)
            alice.messages.append({"role": "user", "content": f"and {step}?"})
            answer, _ = await alice._read(SAMPLING)
            await moving
            expected = [
                {**each, "content": "nothing"} if each["content"] == "a secret" else each
                for each in alice.messages
            ]
            assert answer == oracle.answer(expected, SAMPLING).text, step
            alice.messages.append({"role": "assistant", "content": answer})

    play(live, SETTINGS)


def test_answer_that_moved_midway_is_directed_by_number():
    async def live(world):
        alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
        assert await alice.say("one")
        target = min(world.nodes.keys() - {alice.last.node})
        alice.messages.append({"role": "user", "content": "go on"})
        answering = asyncio.create_task(alice._read(Sampling(max_tokens=24, ignore_eos=True)))
        await asyncio.sleep(MID_ANSWER_S)
        await services.moves.migrate(*alice.key, target)
        answer, _ = await answering
        number = len(alice.messages)
        span = WantedSpan(
            "directives[0]", OperationId("operation-1"), EditMode.FORGET, "nothing", first=number
        )
        await services.fleet.ask_owner(DirectAgent(*alice.key, spans=(span,)))
        alice.messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "and now?"},
        ]
        now, _ = await alice._read(SAMPLING)
        expected = list(alice.messages)
        expected[number] = {"role": "assistant", "content": "nothing"}
        assert now == oracle.answer(expected, SAMPLING).text

    play(live, SETTINGS)


def test_answer_that_moved_midway_keeps_applied_directives():
    async def live(world):
        alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
        assert await alice.say("a secret")
        secret = message_digest(Message(MessageRole.USER, ("a secret",)))
        directive = Directive(
            OperationId("operation-1"), EditMode.FORGET, "nothing", message_digest=secret
        )
        await services.fleet.ask_owner(DirectAgent(*alice.key, (directive,)))
        target = min(world.nodes.keys() - {alice.last.node})
        alice.messages.append({"role": "user", "content": "go on"})
        answering = asyncio.create_task(alice._read(Sampling(max_tokens=24, ignore_eos=True)))
        await asyncio.sleep(MID_ANSWER_S)
        await services.moves.migrate(*alice.key, target)
        assert await answering
        view = await services.fleet.ask_owner(DirectAgent(*alice.key))
        assert [d.is_applied for d in view.directives] == [True]

    play(live, SETTINGS)
