"""A beginning that turns share is computed once, by one of them, while the others wait."""

import asyncio

import pytest

from fabric.edit_mode import EditMode
from fabric.errors import FabricError
from fabric.ids import OperationId, TenantId
from fabric.turn.generation import (
    Admitted,
    Failed,
    Finished,
    GenerateRequest,
    Prefilling,
    Priority,
    Sampling,
)
from node.engine import heads
from node.mlx.engine import Engine
from tests.support.agent_traffic import words
from tests.support.architectures import ARCHITECTURES
from tests.support.conversations import said
from tests.support.services import TENANT, Reply, identity_of, running
from tests.support.tiny_models import LLAMA, write_model

AGENTS = 8
HEAD = words(1, 700)
EXACT = {"exact_chunks": True}
OTHER = TenantId("other")


class Counted:
    """Tokens that a node's engine has prefilled; `at` runs when they reach a number."""

    def __init__(self, monkeypatch):
        self.tokens, self.at, self.then = 0, None, None
        extend = Engine._extend

        def counted(engine, cache, tokens):
            if self.at is not None and self.tokens + len(tokens) > self.at:
                then, self.then, self.at = self.then, None, None
                then(cache)
            result = extend(engine, cache, tokens)
            self.tokens += len(tokens)
            return result

        monkeypatch.setattr(Engine, "_extend", counted)

    def when(self, tokens, then):
        self.at, self.then = tokens, then


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Let no turn stop waiting because this machine is busy."""
    monkeypatch.setattr(heads, "HEAD_WAIT_FACTOR", 1e6)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


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
        messages=said(messages or chat(number)),
        **options,
    )


async def served(service, request, on_event=lambda event: None):
    reply = Reply()
    async for event in service.node.turns.serve(request):
        reply.events.append(event)
        on_event(event)
    return reply


def together(service, requests):
    """Serve requests that arrive at once; return replies, or what was raised."""

    async def serve():
        tasks = [asyncio.create_task(served(service, request)) for request in requests]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run_coroutine_threadsafe(serve(), service._loop).result(300)


def alone(folder, model, requests, **settings):
    """Return the text of each request from a node that served nothing before."""
    texts = []
    for number, request in enumerate(requests):
        with running(folder / f"alone-{number}", model, **settings) as service:
            texts.append(together(service, [request])[0].text)
    return texts


def shared_tokens(replies):
    """Return the tokens with which all prompts begin, by what the last ones found."""
    return max(reply.admitted.cached_tokens for reply in replies)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), LLAMA))


@pytest.mark.parametrize("exact", [False, True])
def test_eight_new_agents_compute_one_head(tmp_path, model, counted, exact):
    requests = [request_of(number) for number in range(AGENTS)]
    settings = {"exact_chunks": exact}
    with running(tmp_path / "one", model, **settings) as service:
        counted.tokens = 0
        replies = together(service, requests)
        computed = counted.tokens
    prompts = [reply.admitted.prompt_tokens for reply in replies]
    head = shared_tokens(replies)
    tails = sum(prompts) - AGENTS * head
    print(prompts, head, tails, computed, [r.admitted.cached_tokens for r in replies])
    assert computed <= 1.1 * head + tails
    assert head >= min(prompts) - 150 if not exact else head % 256 == 0
    assert [reply.text for reply in replies] == alone(tmp_path, model, requests, **settings)
