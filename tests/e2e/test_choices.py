"""Several answers to one request through the official SDK: n, best_of, lists of prompts, echo."""

import re
from collections import defaultdict

import mlx.core as mx
import openai
import pytest

import router.http.sse
from node.mlx.engine import Engine
from tests.support.local_fabric import local_fabric
from tests.support.samples import sample
from tests.support.waiting import wait_until

FACTS = " ".join(f"The vault code of number {n} is otter {n * 7}." for n in range(60))
KV_ERROR_MAX = 0.3  # of a log probability, on average: the largest cost of 4-bit caches here
LONG = [{"role": "user", "content": f"{FACTS} The vault code of number 41 is"}]
USER = [{"role": "user", "content": "The vault code of Mira is otter. The vault code of Mira is"}]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    with local_fabric(tmp_path_factory.mktemp("fabric"), "prose", "node-a", "node-b") as instance:
        yield instance


def agents(fabric):
    return {each["id"] for each in fabric.http.get("/v1/agents").json()["data"]}


def choices_of(stream):
    texts, reasons, usage, order = defaultdict(str), {}, None, []
    for chunk in stream:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            texts[choice.index] += text
            order.append(choice.index)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    return dict(texts), reasons, usage, order


def test_samples_share_prefill_and_differ_by_seed(fabric):
    options = {"model": "prose", "temperature": 2.0, "seed": 7, "max_tokens": 12}
    before = agents(fabric)
    alone = [
        fabric.openai.chat.completions.create(messages=LONG, **{**options, "seed": 7 + i})
        for i in range(3)
    ]
    fabric.http.delete(f"/v1/agents/{next(iter(agents(fabric) - before))}")
    response = fabric.openai.chat.completions.create(messages=LONG, n=3, **options)
    texts = [choice.message.content for choice in response.choices]
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert texts == [each.choices[0].message.content for each in alone]
    assert len(set(texts)) == 3
    assert response.usage.prompt_tokens == alone[0].usage.prompt_tokens
    counts = [each.usage.completion_tokens for each in alone]
    assert response.usage.completion_tokens == sum(counts)
    stream = fabric.openai.chat.completions.create(
        messages=LONG, n=3, stream=True, stream_options={"include_usage": True}, **options
    )
    streamed, reasons, usage, order = choices_of(stream)
    assert [streamed[i] for i in range(3)] == texts
    assert reasons == {i: each.choices[0].finish_reason for i, each in enumerate(alone)}
    assert usage.completion_tokens == sum(counts)
    assert order != sorted(order)


def test_answers_have_the_model_fingerprint(fabric):
    response = fabric.openai.chat.completions.create(
        model="prose", messages=USER, n=2, max_tokens=4, logprobs=True, top_logprobs=2
    )
    stream = fabric.openai.completions.create(
        model="prose", prompt="one", max_tokens=2, stream=True
    )
    fingerprints = {response.system_fingerprint, *(chunk.system_fingerprint for chunk in stream)}
    assert len(fingerprints) == 1
    assert re.fullmatch("fp_[0-9a-f]{12}", fingerprints.pop())
    for choice in response.choices:
        assert len(choice.logprobs.content) == 4
        assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)


@pytest.mark.parametrize("pick", [0, 2])
def test_next_turn_continues_any_choice(fabric, pick):
    messages = [{"role": "user", "content": f"{FACTS} Say something, {pick}."}]
    before = agents(fabric)
    response = fabric.openai.chat.completions.create(
        model="prose", messages=messages, n=3, temperature=2.0, seed=3, max_tokens=9
    )
    assert len(agents(fabric) - before) == 1
    answer = {"role": "assistant", "content": response.choices[pick].message.content}
    again = fabric.chat([*messages, answer, *USER])
    assert again.cached_tokens >= response.usage.prompt_tokens - 1
    assert again.agent in agents(fabric) - before
    assert len(agents(fabric) - before) == 1


def test_samples_of_named_agent_leave_one_agent(fabric):
    headers = {"X-Agent-ID": "chooser"}
    before = agents(fabric)
    response = fabric.openai.chat.completions.create(
        model="prose", messages=LONG, n=4, max_tokens=9, extra_headers=headers
    )
    assert len(response.choices) == 4
    assert agents(fabric) - before == {"chooser"}


@pytest.mark.parametrize("api", sample(["chat", "completions"], "chat"))
def test_prompt_of_all_samples_is_prefilled_once(fabric, api, monkeypatch):
    computed, prefill = [], Engine.prefill

    def counted(engine, cache, tokens):
        computed.append(len(tokens))
        return prefill(engine, cache, tokens)

    monkeypatch.setattr(Engine, "prefill", counted)
    text = f"{api} once. {FACTS}"
    options = {"model": "prose", "n": 5, "max_tokens": 3}
    if api == "chat":
        messages = [{"role": "user", "content": text}]
        response = fabric.openai.chat.completions.create(messages=messages, **options)
    else:
        response = fabric.openai.completions.create(prompt=text, **options)
    assert response.usage.prompt_tokens > 800
    assert sum(computed) == response.usage.prompt_tokens - 1
    assert response.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("count", sample([1, 2], 2))
def test_idle_stream_reports_prefill_progress(fabric, monkeypatch, count):
    monkeypatch.setattr(router.http.sse, "STREAM_SILENCE_S", 0.005)
    messages = [{"role": "user", "content": f"{count} in silence. {FACTS}"}]
    body = {"model": "prose", "messages": messages, "n": count, "max_tokens": 2, "stream": True}
    with fabric.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        raw = b"".join(answer.iter_raw()).decode()
    progress = [
        (int(a), int(b)) for a, b in re.findall(r"^: prefill (\d+)/(\d+)$", raw, re.MULTILINE)
    ]
    assert progress
    assert progress == sorted(progress)
    assert all(0 < done < total for done, total in progress)
    assert raw.endswith("data: [DONE]\n\n")


def test_several_prompts_are_answered_in_order(fabric):
    prompts = ["The harbor color of Ann is red. The harbor color of Ann is", "one two", "The"]
    alone = [
        fabric.openai.completions.create(model="prose", prompt=p, temperature=0) for p in prompts
    ]
    response = fabric.openai.completions.create(model="prose", prompt=prompts, temperature=0)
    assert [c.text for c in response.choices] == [each.choices[0].text for each in alone]
    assert response.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    twice = fabric.openai.completions.create(
        model="prose",
        prompt=prompts,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, _, usage, _ = choices_of(twice)
    assert [texts[i] for i in range(6)] == [c.text for c in response.choices for _ in range(2)]
    assert usage.prompt_tokens == response.usage.prompt_tokens
    assert usage.completion_tokens == 2 * response.usage.completion_tokens


def test_token_id_prompts_answer_like_their_text(fabric):
    text = "The harbor color of Ann is red. The harbor color of Ann is"
    tokenizer = next(iter(fabric.services.values())).node.resources.tokenizer
    ids = tokenizer.encode(text, special_prefix=True).ids
    expected = fabric.openai.completions.create(model="prose", prompt=text, temperature=0)
    for prompt in (ids, [ids]):
        response = fabric.openai.completions.create(model="prose", prompt=prompt, temperature=0)
        assert response.choices[0].text == expected.choices[0].text
        assert response.usage.prompt_tokens == len(ids)
    assert response.usage.prompt_tokens_details.cached_tokens == len(ids) - 1
    with pytest.raises(openai.BadRequestError) as caught:
        fabric.openai.completions.create(model="prose", prompt=[10**9])
    assert caught.value.param == "prompt"


def test_best_of_keeps_most_probable_answers(fabric):
    options = {"model": "prose", "prompt": "one two", "temperature": 2.0, "seed": 1}
    all_of_them = fabric.openai.completions.create(n=6, logprobs=0, **options)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = sorted(all_of_them.choices, key=mean, reverse=True)[:2]
    response = fabric.openai.completions.create(n=2, best_of=6, **options)
    assert [c.text for c in response.choices] == [c.text for c in best]
    assert [c.index for c in response.choices] == [0, 1]
    assert response.choices[0].logprobs is None
    assert response.usage.completion_tokens == all_of_them.usage.completion_tokens


@pytest.mark.parametrize(
    ("stream", "max_tokens"), [(False, 0), pytest.param(True, 3, marks=pytest.mark.nightly)]
)
def test_echoed_prompt_has_logprobs(fabric, max_tokens, stream):
    service = next(iter(fabric.services.values()))
    text = f"{FACTS} The vault code of number 41 is"
    ids = service.node.resources.tokenizer.encode(text, special_prefix=True).ids
    before = agents(fabric)
    options = {"model": "prose", "prompt": ids, "temperature": 0, "max_tokens": max_tokens}
    response = fabric.openai.completions.create(echo=True, logprobs=2, stream=stream, **options)
    if stream:
        chunks = [chunk.choices[0] for chunk in response if chunk.choices]
        answer_text = "".join(each.text for each in chunks)
        logprobs = [each.logprobs.token_logprobs for each in chunks if each.logprobs]
        logprob_values = [value for each in logprobs for value in each]
        reason = chunks[-1].finish_reason
    else:
        (choice,) = response.choices
        answer_text, logprob_values, reason = (
            choice.text,
            choice.logprobs.token_logprobs,
            choice.finish_reason,
        )
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
        assert response.usage.prompt_tokens == len(ids)
        assert response.usage.completion_tokens == max_tokens
    assert answer_text.startswith(text)
    assert (answer_text == text) == (max_tokens == 0)
    assert reason == "length"
    assert logprob_values[0] is None
    assert len(logprob_values) == len(ids) + max_tokens
    expected = probabilities(service, ids)
    off = [abs(a - b) for a, b in zip(logprob_values[1 : len(ids)], expected, strict=True)]
    assert sum(off) / len(off) < KV_ERROR_MAX
    assert agents(fabric) == before


def probabilities(service, ids):
    """Compute each token's probability by the bare model, without our caches."""
    engine = service.node.resources.engine

    def compute():
        logits = engine.engine.model(mx.array([ids]))[0].astype(mx.float32)
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return [logits[at, token].item() for at, token in enumerate(ids[1:])]

    return service._on_loop(engine.between_steps(compute)).result()


def test_echo_without_logprobs_is_text_only(fabric):
    response = fabric.openai.completions.create(
        model="prose", prompt="one two", echo=True, max_tokens=4, temperature=0, n=2
    )
    alone = fabric.openai.completions.create(
        model="prose", prompt="one two", max_tokens=4, temperature=0
    )
    assert [c.text for c in response.choices] == ["one two" + alone.choices[0].text] * 2
    assert response.choices[0].logprobs is None


def test_error_of_one_prompt_fails_the_request(fabric):
    with pytest.raises(openai.BadRequestError) as caught:
        fabric.openai.completions.create(model="prose", prompt=["fine", [10**6]], n=2)
    assert caught.value.param == "prompt"


def test_disconnect_ends_all_answers(fabric):
    stream = fabric.openai.chat.completions.create(
        model="prose",
        messages=USER,
        n=4,
        max_tokens=100_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert any(service.node.live_turns for service in fabric.services.values())
    stream.close()
    for service in fabric.services.values():
        wait_until(lambda live=service.node.live_turns: not len(live))
