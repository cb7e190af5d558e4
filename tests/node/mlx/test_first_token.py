"""The answer's first token, sampled from the chunk that ends the prompt instead of by a step."""

import mlx.core as mx
import pytest

from fabric.turn.generation import Sampling
from node.mlx.device import DeviceError
from node.mlx.loaded_model import load_model
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import ONE_LAYER, write_model

HELD_TOKENS, PROMPT_TOKENS, STEPS = 40, 53, 4
SAMPLING = Sampling(max_tokens=STEPS, logprobs=2)


def prompt_of(engine):
    return [3 + 7 * at % (engine.limits.vocabulary_size - 3) for at in range(PROMPT_TOKENS)]


def answer(engine, *, samples_first):
    """Prefill and decode a few tokens; return them with their log probabilities."""
    prompt, cache = prompt_of(engine), engine.new_cache(PROMPT_TOKENS + STEPS)
    engine.prefill(cache, prompt[:HELD_TOKENS])
    if samples_first:
        logits = engine.prefill(cache, prompt[HELD_TOKENS:])
        slot = engine.start(cache, prompt, SAMPLING, 1)
        engine.sample_first(slot, logits)
    else:
        engine.prefill(cache, prompt[HELD_TOKENS:-1])
        slot = engine.start(cache, prompt, SAMPLING, 1)
        engine.launch(engine.prepare([slot]))
    sampled = []
    for _ in range(STEPS):
        sampled.append(engine.read(slot))
        assert engine.read(slot) is None, "a token is read once"
        engine.launch(engine.prepare([slot]))
        engine.check()
    assert cache.tokens_count == PROMPT_TOKENS + STEPS
    return sampled


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next", "gemma4_text", "deepseek_v2"])
def test_first_token_of_a_chunk_equals_that_of_a_step(tmp_path, name):
    engine = load_model(str(write_model(tmp_path / "model", ARCHITECTURES[name]))).engine
    of_chunk, of_step = (answer(engine, samples_first=first) for first in (True, False))

    assert [each.token for each in of_chunk] == [each.token for each in of_step]
    for ours, theirs in zip(of_chunk, of_step, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-3)


def test_nan_in_the_chunks_logits_is_a_device_error(tmp_path):
    engine = load_model(str(write_model(tmp_path / "model", ONE_LAYER))).engine
    prompt, cache = prompt_of(engine), engine.new_cache(PROMPT_TOKENS + 1)
    logits = engine.prefill(cache, prompt)
    slot = engine.start(cache, prompt, SAMPLING, 1)
    engine.sample_first(slot, logits * mx.array(float("nan")))

    with pytest.raises(DeviceError, match="NaN"):
        engine.check()
