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
ANSWER = "<user>one two three "


def requests_of(fabric):
    return [request for node in fabric.nodes.values() for request in node.requests]


async def test_several_answers_share_one_prefill_on_one_node():
    async with rig("abc") as fabric:
        client = fabric.openai()
        done = await client.chat.completions.create(model=MODEL, messages=USER, n=4, seed=5)
        agents = (await fabric.http().get("/v1/agents")).json()["data"]
        requests = requests_of(fabric)

    assert [choice.message.content for choice in done.choices] == [ANSWER] * 4
    assert done.usage.prompt_tokens == len("<user>one two three")
    assert done.usage.completion_tokens == 4 * 3
    assert len([node for node in fabric.nodes.values() if node.requests]) == 1
    first, *answers = requests
    assert first.sampling.max_tokens == 1
    assert sorted(each.sampling.seed for each in answers) == [5, 6, 7, 8]
    (kept,) = [each for each in answers if each.is_kept]
    assert (kept.sampling.seed, kept.beside) == (5, None)
    (agent,) = agents
    assert {each.beside for each in answers if not each.is_kept} == {agent["id"]}
    assert len({each.operation for each in requests}) == 5
    assert all(each.identity.kind is IdentityKind.CONTENT for each in requests)


async def test_concurrent_answers_are_bounded():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.delay_s = 0.4
        prompts = [f"one {n}" for n in range(2 * ANSWERS_AT_ONCE_MAX)]
        asking = asyncio.create_task(
            fabric.openai().completions.create(model=MODEL, prompt=prompts)
        )
        await until(lambda: len(node.requests) == ANSWERS_AT_ONCE_MAX)
        await asyncio.sleep(0.2)
        concurrent_count = len(node.requests)
        node.behaviour.delay_s = 0.0
        done = await asking

    assert concurrent_count == ANSWERS_AT_ONCE_MAX
    assert [choice.text for choice in done.choices] == [f"{prompt} " for prompt in prompts]


async def test_later_parts_wait_for_full_nodes():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        claim, remember, refused = node._claim, node._remember, []

        def refuse_a_second(request):
            if node.running:
                refused.append(request)
                message = "full"
                raise OverloadedError(message)
            return claim(request)

        def remember_slowly(*of_turn):
            node.behaviour.delay_s = 0.0
            remember(*of_turn)

        node._claim, node._remember, node.behaviour.delay_s = refuse_a_second, remember_slowly, 0.2
        done = await fabric.openai().completions.create(model=MODEL, prompt=["a b", "c d", "e f"])
        node.behaviour.refuse = OverloadedError("full")
        with pytest.raises(openai.RateLimitError):
            await fabric.openai().completions.create(model=MODEL, prompt=["a b", "c d"])

    assert [choice.text for choice in done.choices] == ["a b ", "c d ", "e f "]
    assert refused


@pytest.mark.parametrize("stream", [False, True])
async def test_error_of_one_answer_ends_all(stream):
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.delay_s = 0.05
        answer = node._answer

        def break_one(request, text):
            if request.sampling.max_tokens == 1:
                return answer(request, text)
            if request.sampling.seed == 2:
                return [Failed(500, "engine_failed", "broken")]
            return [Delta(at, "x ") for at in range(10_000)]

        node._answer = break_one

        async def ask():
            request = {"model": MODEL, "prompt": ["a b c"] * 3, "seed": 0, "n": 3}
            stream_or_answer = await fabric.openai().completions.create(**request, stream=stream)
            async for _ in stream_or_answer:
                pass

        with pytest.raises(openai.APIError) as caught:
            await ask()
        await until(lambda: not node.running)

    assert caught.value.code == "engine_failed"


async def test_disconnected_client_ends_all_answers():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.delay_s = 0.02
        answer = node._answer
        node._answer = lambda request, text: (
            answer(request, text)
            if request.sampling.max_tokens == 1
            else [Delta(at, "x ") for at in range(10_000)]
        )
        stream = await fabric.openai().completions.create(
            model=MODEL, prompt="a b c", n=4, stream=True, max_tokens=9
        )
        await anext(aiter(stream))
        await until(lambda: node.running == 4)
        await stream.close()
        await until(lambda: not node.running)

    assert node.cancelled == 4
    assert len(node.memory) == 1


async def test_streamed_choices_have_their_indexes():
    async with rig("a") as fabric:
        stream = await fabric.openai().chat.completions.create(
            model=MODEL, messages=USER, n=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    for index in range(3):
        own = [each for chunk in chunks for each in chunk.choices if each.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == ANSWER
        assert own[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 9
    assert not chunks[-1].choices


async def test_unkept_turn_belongs_to_no_agent():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.events = [
            Delta(-1, "one two"),
            Delta(0, "three"),
            Finished(FinishReason.STOP, 1),
        ]
        client = fabric.openai()
        body = {"model": MODEL, "prompt": "one two", "echo": True}
        whole = await client.completions.create(**body)
        read = await client.completions.create(**body, max_tokens=0)
        events = [each.event for each in fabric.fleet.events._kept]

    assert whole.choices[0].text == "one twothree"
    assert (read.choices[0].text, read.choices[0].finish_reason) == ("one two", "length")
    assert read.usage.completion_tokens == 0
    assert not node.memory
    assert not [event for event in events if type(event).__name__.startswith("Turn")]
    assert all(isinstance(each, Admitted) or not each.is_kept for each in node.requests)
