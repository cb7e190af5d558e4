"""Several answers to one request over fake nodes."""

import asyncio

import openai
import pytest

from fabric.errors import OverloadedError
from fabric.turn.generation import Admitted, Delta, Failed, Finished, FinishReason, IdentityKind
from router.limits import ANSWERS_AT_ONCE_MAX
from tests.router.fake_node import MODEL
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "one two three"}]
SAID = "<user>one two three "


def asked_of(made):
    return [asked for node in made.nodes.values() for asked in node.requests]


async def test_a_prompt_is_computed_once_and_answered_on_its_node():
    async with rig("abc") as made:
        client = made.openai()
        done = await client.chat.completions.create(model=MODEL, messages=USER, n=4, seed=5)
        agents = (await made.http().get("/v1/agents")).json()["data"]
        requests = asked_of(made)

    assert [choice.message.content for choice in done.choices] == [SAID] * 4
    assert done.usage.prompt_tokens == len("<user>one two three")
    assert done.usage.completion_tokens == 4 * 3
    assert len([node for node in made.nodes.values() if node.requests]) == 1
    first, *answers = requests
    assert first.sampling.max_tokens == 1
    assert sorted(each.sampling.seed for each in answers) == [5, 6, 7, 8]
    (kept,) = [each for each in answers if each.is_kept]
    assert (kept.sampling.seed, kept.beside) == (5, None)
    (agent,) = agents
    assert {each.beside for each in answers if not each.is_kept} == {agent["id"]}
    assert len({each.operation for each in requests}) == 5
    assert all(each.identity.kind is IdentityKind.CONTENT for each in requests)


async def test_answers_at_once_are_bounded():
    async with rig("a") as made:
        node = made["node-a"]
        node.does.delay_s = 0.4
        prompts = [f"one {n}" for n in range(2 * ANSWERS_AT_ONCE_MAX)]
        asking = asyncio.create_task(made.openai().completions.create(model=MODEL, prompt=prompts))
        await until(lambda: len(node.requests) == ANSWERS_AT_ONCE_MAX)
        await asyncio.sleep(0.2)
        asked_at_once = len(node.requests)
        node.does.delay_s = 0.0
        done = await asking

    assert asked_at_once == ANSWERS_AT_ONCE_MAX
    assert [choice.text for choice in done.choices] == [f"{prompt} " for prompt in prompts]


async def test_full_nodes_are_waited_for_once_a_part_is_admitted():
    async with rig("a") as made:
        node = made["node-a"]
        claim, remember, refused = node._claim, node._remember, []

        def refuse_a_second(asked):
            if node.running:
                refused.append(asked)
                message = "full"
                raise OverloadedError(message)
            return claim(asked)

        def remember_slowly(*of_turn):
            node.does.delay_s = 0.0
            remember(*of_turn)

        node._claim, node._remember, node.does.delay_s = refuse_a_second, remember_slowly, 0.2
        done = await made.openai().completions.create(model=MODEL, prompt=["a b", "c d", "e f"])
        node.does.refuse = OverloadedError("full")
        with pytest.raises(openai.RateLimitError):
            await made.openai().completions.create(model=MODEL, prompt=["a b", "c d"])

    assert [choice.text for choice in done.choices] == ["a b ", "c d ", "e f "]
    assert refused


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_one_ends_all(stream):
    async with rig("a") as made:
        node = made["node-a"]
        node.does.delay_s = 0.05
        answer = node._answer

        def break_one(asked, text):
            if asked.sampling.max_tokens == 1:
                return answer(asked, text)
            if asked.sampling.seed == 2:
                return [Failed(500, "engine_failed", "broken")]
            return [Delta(at, "x ") for at in range(10_000)]

        node._answer = break_one

        async def ask():
            asked = {"model": MODEL, "prompt": ["a b c"] * 3, "seed": 0, "n": 3}
            answered = await made.openai().completions.create(**asked, stream=stream)
            async for _ in answered:
                pass

        with pytest.raises(openai.APIError) as caught:
            await ask()
        await until(lambda: not node.running)

    assert caught.value.code == "engine_failed"


async def test_a_client_that_leaves_ends_all():
    async with rig("a") as made:
        node = made["node-a"]
        node.does.delay_s = 0.02
        answer = node._answer
        node._answer = lambda asked, text: (
            answer(asked, text)
            if asked.sampling.max_tokens == 1
            else [Delta(at, "x ") for at in range(10_000)]
        )
        stream = await made.openai().completions.create(
            model=MODEL, prompt="a b c", n=4, stream=True, max_tokens=9
        )
        await anext(aiter(stream))
        await until(lambda: node.running == 4)
        await stream.close()
        await until(lambda: not node.running)

    assert node.cancelled == 4
    assert len(node.memory) == 1


async def test_choices_of_a_stream_have_their_numbers():
    async with rig("a") as made:
        stream = await made.openai().chat.completions.create(
            model=MODEL, messages=USER, n=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    for index in range(3):
        own = [each for chunk in chunks for each in chunk.choices if each.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == SAID
        assert own[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 9
    assert not chunks[-1].choices


async def test_a_turn_that_is_not_kept_belongs_to_no_agent():
    async with rig("a") as made:
        node = made["node-a"]
        node.does.events = [
            Delta(-1, "one two"),
            Delta(0, "three"),
            Finished(FinishReason.STOP, 1),
        ]
        client = made.openai()
        asked = {"model": MODEL, "prompt": "one two", "echo": True}
        whole = await client.completions.create(**asked)
        read = await client.completions.create(**asked, max_tokens=0)
        events = [each.event for each in made.fleet.events._kept]

    assert whole.choices[0].text == "one twothree"
    assert (read.choices[0].text, read.choices[0].finish_reason) == ("one two", "length")
    assert read.usage.completion_tokens == 0
    assert not node.memory
    assert not [event for event in events if type(event).__name__.startswith("Turn")]
    assert all(isinstance(each, Admitted) or not each.is_kept for each in node.requests)
