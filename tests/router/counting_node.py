"""A fake node that counts a prompt's characters in place of tokens, or breaks."""

import json

from aiohttp import web

from fabric.codec import from_plain, parse_json
from fabric.keys import http_secret
from fabric.turn.generation import CLUSTER_HEADER, COUNT_PATH, GenerateRequest
from tests.router.fake_node import CLUSTER_KEY, FakeNode


class CountingNode(FakeNode):
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
        prompt = from_plain(GenerateRequest, parse_json(await request.read()), "request")
        self.counted.append(prompt)
        if prompt.messages is None:
            return web.json_response({"tokens": len(prompt.prompt or prompt.prompt_ids)})
        return web.json_response({"tokens": sum(map(chars_of, prompt.messages))})


def chars_of(message):
    arguments = [json.dumps(use.arguments) for use in message.uses if use.arguments]
    return sum(map(len, (*message.texts, message.reasoning or "", *arguments)))
