"""Turns of agents with a common prompt head, and counts of the tokens computed for them."""

import asyncio
from collections import Counter

from fabric.ids import OperationId
from fabric.turn.generation import GenerateRequest, Sampling
from node.mlx.engine import Engine
from tests.support.agent_traffic import words
from tests.support.conversations import read_messages
from tests.support.services import TENANT, Reply, identity_of

HEAD = words(1, 700)


class Counted:
    """Counter of prefilled tokens; `then` runs when the count reaches `at`."""

    def __init__(self, monkeypatch):
        self.tokens, self.at, self.then = 0, None, None
        self.by_engine = Counter()
        extend = Engine._extend

        def counted(engine, cache, tokens):
            if self.at is not None and self.tokens + len(tokens) > self.at:
                then, self.then, self.at = self.then, None, None
                then(cache)
            result = extend(engine, cache, tokens)
            self.tokens += len(tokens)
            self.by_engine[engine] += len(tokens)
            return result

        monkeypatch.setattr(Engine, "_extend", counted)

    def reset(self):
        """Reset the count: a node computes some tokens when it starts."""
        self.tokens = 0
        self.by_engine.clear()

    def when(self, tokens, then):
        self.at, self.then = tokens, then

    def of(self, service):
        """Return the tokens that a node's engine has prefilled."""
        return self.by_engine[service.node.resources.engine.engine]


def chat(number, head=HEAD, tail=20):
    return [
        {"role": "system", "content": head},
        {"role": "user", "content": words(100 + number, tail)},
    ]


def request_of(number, *, tenant=TENANT, messages=None, **options):
    sampling = Sampling(max_tokens=options.pop("max_tokens", 8))
    return GenerateRequest(
        operation=OperationId(f"heads-{tenant}-{number}"),
        tenant=tenant,
        identity=identity_of(options.pop("agent", f"agent-{number}")),
        sampling=sampling,
        messages=read_messages(messages or chat(number)),
        **options,
    )


async def serve_turn(service, request, on_event=lambda event: None):
    reply = Reply()
    async for event in service.node.turns.serve(request):
        reply.events.append(event)
        on_event(event)
    return reply


def together(service, requests):
    """Serve requests that arrive together; return their replies or exceptions."""

    async def serve():
        tasks = [asyncio.create_task(serve_turn(service, request)) for request in requests]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run_coroutine_threadsafe(serve(), service._loop).result(300)
