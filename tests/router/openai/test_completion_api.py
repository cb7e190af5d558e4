from operator import attrgetter

import openai
import pytest

from fabric.turn.generation import Delta, Finished, FinishReason, Priority, TokenLogprob
from router.limits import ANSWERS_PER_PROMPT_MAX, PROMPTS_MAX
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "x"}


async def test_completion_is_equal_streamed_and_unstreamed():
    async with rig("a") as fabric:
        client = fabric.openai()
        whole = await client.completions.create(model=MODEL, prompt="one two three")
        stream = await client.completions.create(
            model=MODEL,
            prompt="one two three",
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        request = fabric["node-a"].requests[0]

    assert request.prompt == "one two three"
    assert request.messages is None
    assert request.sampling.max_tokens == 16
    assert whole.object == "text_completion"
    assert whole.choices[0].text == "one two three "
    assert whole.usage.completion_tokens == 3
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "one two three "
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


async def test_logprobs_have_text_offsets_across_stream():
    events = [
        Delta(0, "ab", logprobs=(TokenLogprob("ab", -0.1, (("ab", -0.1), ("x", -3.0))),)),
        Delta(1, "c", logprobs=(TokenLogprob("c", -0.2),)),
        Finished(FinishReason.STOP, 2),
    ]
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = events
        client = fabric.openai()
        whole = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
        stream = await client.completions.create(model=MODEL, prompt="x", logprobs=2, stream=True)
        chunks = [chunk async for chunk in stream]

    assert whole.choices[0].logprobs.tokens == ["ab", "c"]
    assert whole.choices[0].logprobs.text_offset == [0, 2]
    assert whole.choices[0].logprobs.top_logprobs[0] == {"ab": -0.1, "x": -3.0}
    assert chunks[1].choices[0].logprobs.text_offset == [2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt"),
        ({"prompt": ["a"] * PROMPTS_MAX, "n": 3}, "prompt"),
        ({"prompt": ["a", "b"], "extra_headers": {"X-Agent-ID": "mira"}}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "n": ANSWERS_PER_PROMPT_MAX + 1}, "n"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "echo": "yes"}, "echo"),
        ({"prompt": "x", "echo": True, "extra_headers": {"X-Agent-ID": "mira"}}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "max_tokens": -2}, "max_tokens"),
    ],
)
async def test_invalid_field_is_rejected_with_its_parameter(fields, param):
    async with rig("a", tended=False) as fabric:
        with pytest.raises(openai.BadRequestError) as caught:
            await fabric.openai().completions.create(model=MODEL, **fields)

    assert caught.value.param == param


@pytest.mark.parametrize("api", ["chat.completions", "completions"])
async def test_priority_reaches_node_and_is_validated(api):
    body = {"prompt": "x"} if api == "completions" else {"messages": [USER]}
    async with rig("a") as fabric:
        client = attrgetter(api)(fabric.openai())
        header = {"X-Macfabric-Priority": "background"}
        await client.create(model=MODEL, **body)
        await client.create(model=MODEL, **body, extra_headers=header)
        await client.create(model=MODEL, **body, extra_body={"service_tier": "flex"})
        with pytest.raises(openai.BadRequestError) as caught:
            await client.create(model=MODEL, **body, extra_headers=dict.fromkeys(header, "soon"))
        priorities = [request.priority for request in fabric["node-a"].requests]

    assert priorities == [Priority.INTERACTIVE, Priority.BACKGROUND, Priority.BACKGROUND]
    assert caught.value.param == "x-macfabric-priority"
    assert caught.value.body["code"] == "invalid_value"


async def test_list_of_one_prompt_is_one_prompt():
    async with rig("a", tended=False) as fabric:
        done = await fabric.openai().completions.create(model=MODEL, prompt=["one"])

    assert done.choices[0].text == "one "
