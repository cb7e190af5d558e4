"""A head that turns share is computed once, by one of them, while the others wait."""

import asyncio
from dataclasses import replace

import pytest

from fabric.control.calls import encode_call
from fabric.control.directive_calls import ChangeSettings
from fabric.control.erasure_calls import EraseAgent
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId, OperationId, TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import Admitted, Sampling
from node.engine import heads
from tests.support.agent_traffic import words
from tests.support.architectures import ARCHITECTURES
from tests.support.services import TENANT, ask, call, running
from tests.support.shared_heads import Counted, chat, request_of, serve_turn, together
from tests.support.tiny_models import ONE_LAYER, write_model

AGENTS = 8
EXACT = {"exact_chunks": True}
OTHER = TenantId("other")


@pytest.fixture(autouse=True)
def _lift_time_limits(monkeypatch):
    """Make turns wait without a limit, as this machine may be busy."""
    monkeypatch.setattr(heads, "HEAD_WAIT_FACTOR", 1e6)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def alone(folder, model, requests, **settings):
    """Return the text of each request from a node that served nothing before."""
    texts = []
    for number, request in enumerate(requests):
        with running(folder / f"alone-{number}", model, **settings) as service:
            texts.append(together(service, [request])[0].text)
    return texts


def shared_tokens(replies):
    """Return the number of tokens that all prompts share, as the last ones matched them."""
    return max(reply.admitted.cached_tokens for reply in replies)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), ONE_LAYER))


@pytest.fixture(scope="module")
def cold_texts(tmp_path_factory, model):
    """Return the answers of nodes that each serve one agent only."""
    requests = [request_of(number) for number in range(AGENTS)]
    return alone(tmp_path_factory.mktemp("alone"), model, requests)


def check_one_head(replies, computed, *, heads_max=1.1):
    """Check that the shared head was computed once, and each tail by its own turn."""
    prompts = [reply.admitted.prompt_tokens for reply in replies]
    head = max(reply.admitted.cached_tokens for reply in replies)
    assert head >= min(prompts) // 2
    tails = sum(count - head for count in prompts)
    assert computed <= heads_max * head + tails, [r.admitted.cached_tokens for r in replies]


def test_eight_new_agents_compute_a_shared_head_once(tmp_path, model, counted, cold_texts):
    with running(tmp_path / "one", model) as service:
        counted.tokens = 0
        replies = together(service, [request_of(number) for number in range(AGENTS)])
        check_one_head(replies, counted.tokens)
    assert [reply.text for reply in replies] == cold_texts
    prompts = [reply.admitted.prompt_tokens for reply in replies]
    cached = [reply.admitted.cached_tokens for reply in replies]
    assert sorted(cached)[1] > min(prompts) - 150, "all but the few tokens of their own"


def test_agents_with_other_histories_share_a_new_head(tmp_path, model, counted, cold_texts):
    """The agents' old caches are hot, and share only the template's words with the new prompt."""
    with running(tmp_path / "one", model) as service:
        for number in range(4):
            ask(service, chat(number, words(60 + number, 90)), agent=f"agent-{number}")
        counted.tokens = 0
        replies = together(service, [request_of(number) for number in range(4)])
        check_one_head(replies, counted.tokens)
    assert [reply.text for reply in replies] == cold_texts[:4]


def test_head_is_published_before_the_leads_answer_ends(tmp_path, model):
    """The lead's own turn continues long after its followers have answered."""
    long = Sampling(max_tokens=20_000, ignore_eos=True)

    async def serve(service):
        began = asyncio.Event()
        slow = replace(request_of(0), sampling=long)
        first = asyncio.create_task(serve_turn(service, slow, lambda _: began.set()))
        await began.wait()
        others = await asyncio.gather(*(serve_turn(service, request_of(n)) for n in (1, 2)))
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return others

    with running(tmp_path / "one", model) as service:
        others = asyncio.run_coroutine_threadsafe(serve(service), service._loop).result(300)
    assert all(reply.admitted.cached_tokens > 3_000 for reply in others)


def test_exact_chunks_share_whole_blocks(tmp_path, model, counted):
    requests = [request_of(number) for number in range(3)]
    settings = {"exact_chunks": True}
    with running(tmp_path / "one", model, **settings) as service:
        counted.tokens = 0
        replies = together(service, requests)
        check_one_head(replies, counted.tokens)
    assert sorted(reply.admitted.cached_tokens % BLOCK_TOKENS for reply in replies) == [0, 0, 0]
    assert [reply.text for reply in replies] == alone(tmp_path, model, requests, **settings)


@pytest.mark.parametrize("end", ["cancelled", "failed", "erased"])
def test_follower_continues_when_the_lead_is_gone(tmp_path, model, counted, cold_texts, end):
    """The follower continues from the tokens that the lead published, step by step."""
    with running(tmp_path / "one", model) as service:
        gone = []

        def leave(cache):
            (turn,) = [t for t in service.node.live_turns if t._sequence.cache is cache]
            gone.append(turn._request.identity.agent)
            if end == "failed":
                message = "a planted failure"
                raise ValueError(message)
            if end == "cancelled":
                turn.cancel()
            else:
                erase = EraseAgent(TENANT, gone[0], 1, OperationId("erase"), erased_s=0.0)
                gone.append(service.control(encode_call(erase)))

        counted.tokens = 0
        counted.when(1_800, leave)
        outcomes = together(service, [request_of(number) for number in range(AGENTS)])
        computed = counted.tokens
    survivors = {n: r for n, r in enumerate(outcomes) if f"agent-{n}" != gone[0]}
    assert {n: r.text for n, r in survivors.items()} == {n: cold_texts[n] for n in survivors}
    # A failing chunk is lost; of an erased agent, all computed rows are dropped.
    most = {"cancelled": 1.1, "failed": 1.5, "erased": 2.1}[end]
    check_one_head(list(survivors.values()), computed, heads_max=most)


@pytest.mark.parametrize("kind", ["private", "tenants"])
def test_turns_do_not_wait_for_private_or_foreign_heads(
    tmp_path, model, counted, cold_texts, monkeypatch, kind
):
    lookups = []
    monkeypatch.setattr(heads.Heads, "_request_publishing", lambda *_, **__: lookups.append(kind))
    if kind == "private":
        requests = [request_of(number, is_private=True) for number in range(3)]
    else:
        requests = [request_of(number, tenant=TenantId(f"t{number}")) for number in range(3)]
    with running(tmp_path / "one", model) as service:
        counted.tokens = 0
        replies = together(service, requests)
        computed = counted.tokens
    assert not lookups
    assert [reply.admitted.cached_tokens for reply in replies] == [0, 0, 0]
    assert computed >= sum(reply.admitted.prompt_tokens - 1 for reply in replies)
    assert [reply.text for reply in replies] == cold_texts[:3]


def test_public_heads_are_shared_beside_a_private_agent(tmp_path, model, counted, cold_texts):
    with running(tmp_path / "one", model) as service:
        ask(service, chat(50), agent="private", max_tokens=1)
        call(service, ChangeSettings(TENANT, AgentId("private"), is_private=True), AgentView)
        counted.tokens = 0
        replies = together(service, [request_of(number) for number in range(3)])
        check_one_head(replies, counted.tokens)
    assert [reply.text for reply in replies] == cold_texts[:3]


def test_additional_answers_wait_for_the_kept_one(tmp_path, model, counted, cold_texts):
    kept = request_of(0)
    options = {"is_kept": False, "beside": kept.identity.agent}
    more = [replace(kept, operation=OperationId(f"more-{n}"), **options) for n in range(3)]

    async def serve(service):
        tasks = []

        def admit(event):
            if isinstance(event, Admitted) and not tasks:
                tasks.extend(asyncio.create_task(serve_turn(service, request)) for request in more)

        return [await serve_turn(service, kept, admit), *(await asyncio.gather(*tasks))]

    with running(tmp_path / "one", model) as service:
        counted.tokens = 0
        replies = asyncio.run_coroutine_threadsafe(serve(service), service._loop).result(300)
        check_one_head(replies, counted.tokens)
    assert {reply.text for reply in replies} == {cold_texts[0]}


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_windows_and_recurrent_states_of_a_head_are_published(tmp_path, counted, name):
    model = str(write_model(tmp_path / "model", ARCHITECTURES[name]))
    requests = [request_of(number, messages=chat(number, words(1, 300))) for number in range(3)]
    with running(tmp_path / "one", model) as service:
        counted.tokens = 0
        replies = together(service, requests)
        check_one_head(replies, counted.tokens)
    assert [reply.text for reply in replies] == alone(tmp_path, model, requests)
