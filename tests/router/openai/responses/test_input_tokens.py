"""The tokens of a response's prompt are counted by a node, and compaction is a clear 404."""

import openai
import pytest

from tests.router.counting_node import CountingNode
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
PATH = "/v1/responses/input_tokens"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


async def test_input_tokens_counts_full_prompt():
    async with rig(nodes=[CountingNode("node-a")]) as fabric:
        client = fabric.openai()
        counted = await client.responses.input_tokens.count(
            model=MODEL, input="say one two", instructions="be brief", tools=[LOOK]
        )
        node = fabric["node-a"]
        first = await client.responses.create(model=MODEL, input="hello")
        continued = await client.responses.input_tokens.count(
            model=MODEL, input="again", previous_response_id=first.id
        )

    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        len("say one twobe brief"),
    )
    assert node.counted[0].tools[0]["function"]["name"] == "look"
    assert [message.role for message in node.counted[1].messages] == ["user", "assistant", "user"]
    assert continued.input_tokens > len("helloagain")


async def test_input_tokens_lists_ignored_images_and_hosted_tools():
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
    body = {"model": MODEL, "input": [picture], "tools": [{"type": "web_search"}]}
    async with rig(nodes=[CountingNode("node-a")]) as fabric:
        answer = await fabric.http().post(PATH, json=body)
    assert answer.headers["x-macfabric-ignored"] == "web_search, input_image"


async def test_input_tokens_rejects_unknown_model_input_or_response():
    async with rig(nodes=[CountingNode("node-a")]) as fabric:
        client = fabric.openai()
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(model="gpt", input="x")
        with pytest.raises(openai.BadRequestError, match="input"):
            await client.responses.input_tokens.count(model=MODEL)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await client.responses.input_tokens.count(
                model=MODEL, input="x", previous_response_id="resp_1"
            )


async def test_compaction_is_404_with_advice():
    async with rig(nodes=[CountingNode("node-a")]) as fabric:
        body = {"model": MODEL, "input": "x"}
        answer = await fabric.http().post("/v1/responses/compact", json=body)
        shown = await fabric.http().get("/v1/responses/compact")
        counted = await fabric.http().get(PATH)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert "truncation" in error["message"]
    assert (shown.status_code, counted.status_code) == (404, 404)
