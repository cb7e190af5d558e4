import anthropic
import pytest

from tests.router.counting_node import CountingNode
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "say one two three"}]
TOOL = {"name": "look", "input_schema": {"type": "object"}}


async def test_node_counts_tokens_of_prompt():
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        counted = await fabric.anthropic().messages.count_tokens(
            model=MODEL, messages=USER, system="be brief", tools=[TOOL]
        )

    assert counted.input_tokens == len("say one two threebe brief")
    assert node.counted[0].tools[0]["function"]["name"] == "look"
    assert node.requests == []


async def test_count_falls_back_to_another_node():
    nodes = [CountingNode("node-a"), CountingNode("node-b")]
    nodes[0].breaks = True
    async with rig(nodes=nodes) as fabric:
        counted = await fabric.anthropic().messages.count_tokens(model=MODEL, messages=USER)
        nodes[1].breaks = True
        with pytest.raises(anthropic.APIStatusError) as caught:
            await fabric.anthropic().messages.count_tokens(model=MODEL, messages=USER)

    assert counted.input_tokens == len("say one two three")
    assert caught.value.status_code == 529


async def test_count_rejects_unknown_model_and_empty_messages():
    async with rig(nodes=[CountingNode("node-a")]) as fabric:
        client = fabric.anthropic()
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="gpt", messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.count_tokens(model=MODEL, messages=[])
