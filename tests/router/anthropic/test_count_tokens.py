import anthropic
import pytest
from aiohttp import web

from fabric.codec import from_plain, parse_json
from fabric.keys.cluster_secret import http_secret
from fabric.turn.generation import CLUSTER_HEADER, COUNT_PATH, GenerateRequest
from fabric.turn.messages import template_form
from tests.router.fake_node import CLUSTER_KEY, MODEL, FakeNode
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "say one two three"}]
TOOL = {"name": "look", "input_schema": {"type": "object"}}


class Counting(FakeNode):
    """Counts a prompt's characters, or breaks."""

    def __init__(self, name):
        super().__init__(name)
        self.counted = []
        self.breaks = False
        self.more_routes[COUNT_PATH] = self._count

    async def _count(self, request):
        assert request.headers[CLUSTER_HEADER] == http_secret(CLUSTER_KEY)
        if self.breaks:
            request.transport.abort()
            return web.Response()
        asked = from_plain(GenerateRequest, parse_json(await request.read()), "request")
        self.counted.append(asked)
        messages = [template_form(message) for message in asked.messages]
        return web.json_response({"tokens": sum(len(m["content"]) for m in messages)})


async def test_a_node_counts_what_would_be_sent():
    node = Counting("node-a")
    async with rig(nodes=[node]) as made:
        counted = await made.anthropic().messages.count_tokens(
            model=MODEL, messages=USER, system="be brief", tools=[TOOL]
        )

    assert counted.input_tokens == len("say one two threebe brief")
    assert node.counted[0].tools[0]["function"]["name"] == "look"
    assert node.requests == []


async def test_another_node_counts_where_one_breaks():
    nodes = [Counting("node-a"), Counting("node-b")]
    nodes[0].breaks = True
    async with rig(nodes=nodes) as made:
        counted = await made.anthropic().messages.count_tokens(model=MODEL, messages=USER)
        nodes[1].breaks = True
        with pytest.raises(anthropic.APIStatusError) as told:
            await made.anthropic().messages.count_tokens(model=MODEL, messages=USER)

    assert counted.input_tokens == len("say one two three")
    assert told.value.status_code == 529


async def test_what_cannot_be_counted_is_refused():
    async with rig(nodes=[Counting("node-a")]) as made:
        client = made.anthropic()
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="gpt", messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.count_tokens(model=MODEL, messages=[])
