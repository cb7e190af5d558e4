"""mlx-lm's own BatchGenerator on quantized caches answers like single requests."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from node.mlx.batch_quantized_cache import MergeableQuantizedKVCache
from node.mlx.token_store import GROWTH_TOKENS
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import build_model

PACKED = ["llama", "qwen2", "qwen3", "glm4_moe", "minimax_m2", "deepseek_v2", "qwen3_next"]


class RoundTripKVCache(KVCache):
    """mlx-lm's float cache with values rounded to 4 bits, as attention should read them."""

    def update_and_fetch(self, keys, values):
        return super().update_and_fetch(
            *(mx.dequantize(*mx.quantize(a, 64, 4), 64, 4) for a in (keys, values))
        )


def caches(model, make):
    return [make() if isinstance(c, KVCache) else c for c in make_prompt_cache(model)]


def alone(model, prompt, count, make):
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=caches(model, make)
    )
    return [token for token, _ in steps]


def tokens(seed, count):
    return np.random.default_rng(seed).integers(10, 500, count).tolist()


def finish(generator, answers, steps=1_000):
    """Run the generator until it ends or for some steps; return the last response by uid."""
    last = {}
    for _ in range(steps):
        responses = generator.next_generated()
        if not responses:
            break
        for response in responses:
            answers.setdefault(response.uid, []).append(response.token)
            last[response.uid] = response
    return last


@pytest.fixture(scope="module")
def model_of():
    built = {}

    def build(name, **changes):
        key = name, *changes.items()
        if key not in built:
            layers = 4 if name.startswith("qwen3_next") else 2
            config = {**ARCHITECTURES[name], "num_hidden_layers": layers, **changes}
            built[key] = build_model(config)
        return built[key]

    return build


CASES = [(name, False) for name in PACKED] + [("llama", True), ("deepseek_v3", True)]


@pytest.mark.parametrize(("name", "dequantized"), CASES)
def test_batch_answers_like_each_request_alone(model_of, name, dequantized):
    """Unequal prompts, one past a growth step; they end at different times, and one joins late."""
    model = model_of(name)
    mine = lambda: MergeableQuantizedKVCache(64, 4, dequantized=dequantized)  # noqa: E731
    oracle = RoundTripKVCache if dequantized else lambda: QuantizedKVCache(64, 4)
    longest = 50 if name == "qwen3_next" else GROWTH_TOKENS - 5  # mlx-lm's recurrence is slow here
    prompts = [tokens(1, longest), tokens(2, 41), tokens(3, 9), tokens(4, 30)]
    counts = [12, 3, 8, 6]
    generator = BatchGenerator(model, prefill_step_size=64)
    answers = {}

    insert = lambda some: generator.insert(  # noqa: E731
        [prompts[i] for i in some],
        [counts[i] for i in some],
        [caches(model, mine) for _ in some],
    )
    uids = insert([0, 1, 2])
    last = finish(generator, answers, steps=2)
    uids += insert([3])
    last |= finish(generator, answers)

    for uid, prompt, count in zip(uids, prompts, counts, strict=True):
        assert answers[uid] == alone(model, prompt, count, oracle)
        assert last[uid].all_tokens == prompt + answers[uid]
        kinds = {type(c) for c in last[uid].prompt_cache if hasattr(c, "offset")}
        assert kinds == {MergeableQuantizedKVCache}
        assert {c.offset for c in last[uid].prompt_cache if hasattr(c, "offset")} == {
            len(prompt) + count
        }


@pytest.mark.parametrize(
    ("name", "dequantized"), [("llama", False), ("qwen3_next", False), ("deepseek_v3", True)]
)
def test_second_turns_on_extracted_caches_answer_like_cold_requests(model_of, name, dequantized):
    """One cache is used twice: merging it into a batch leaves it unchanged."""
    model = model_of(name)
    mine = lambda: MergeableQuantizedKVCache(64, 4, dequantized=dequantized)  # noqa: E731
    oracle = RoundTripKVCache if dequantized else lambda: QuantizedKVCache(64, 4)
    prompts = [tokens(5, 33), tokens(6, 12)]
    generator, answers = BatchGenerator(model, max_tokens=4), {}
    first = generator.insert(prompts, caches=[caches(model, mine) for _ in prompts])
    ends = finish(generator, answers)
    parents = [ends[first[0]], ends[first[1]], ends[first[0]]]
    turns = [tokens(7, 20), tokens(8, 1), tokens(9, 3)]

    second = generator.insert(
        turns,
        caches=[parent.prompt_cache for parent in parents],
        all_tokens=[list(parent.all_tokens) for parent in parents],
    )
    finish(generator, answers)

    for uid, parent, turn in zip(second, parents, turns, strict=True):
        assert answers[uid] == alone(model, parent.all_tokens + turn, 4, oracle)


@pytest.mark.parametrize("rows", [2, 4])  # as many as key heads, as many as query heads
@pytest.mark.parametrize("answered_count", [0, 1, 3])
def test_removed_sequence_resumes_elsewhere_and_the_rest_continue(model_of, rows, answered_count):
    model = model_of("llama")
    assert {rows} <= {model.args.num_key_value_heads, model.args.num_attention_heads}
    prompts = [tokens(10 + row, 40 - 9 * row) for row in range(rows)]
    generator, answers = BatchGenerator(model, max_tokens=8, prefill_step_size=16), {}
    prompt_caches = [caches(model, MergeableQuantizedKVCache) for _ in prompts]
    uids = generator.insert(prompts, caches=prompt_caches)
    generator.next()  # the first chunk of the prompts
    while len(answers.get(uids[0], [])) < answered_count:
        finish(generator, answers, steps=1)
    cache, held = generator.remove([uids[0]], return_prompt_caches=True)[uids[0]]
    answered = answers.pop(uids[0], [])
    finish(generator, answers)

    assert held == (prompts[0] + answered if answered else prompts[0][:16])
    assert {layer.offset for layer in cache} == {len(held)}
    rest = prompts[0][len(held) :]
    if not rest:  # feed the last token again: the batch took its successor
        rest, held = held[-1:], held[:-1]
        assert [layer.trim(1) for layer in cache] == [1] * len(cache)
    other = BatchGenerator(model, max_tokens=8 - len(answered))
    (resumed,) = other.insert([rest], caches=[cache], all_tokens=[held])
    tail = {}
    finish(other, tail)

    native = lambda: QuantizedKVCache(64, 4)  # noqa: E731
    assert answered + tail[resumed] == alone(model, prompts[0], 8, native)
    for uid, prompt in zip(uids[1:], prompts[1:], strict=True):
        assert answers[uid] == alone(model, prompt, 8, native)
