"""Log probabilities are numbers that JSON can spell, whatever a model computes."""

import math

import mlx.core as mx
import pytest

from fabric.settings import KvBits
from fabric.turn.generation import Sampling
from node.mlx.engine import LOGPROB_MIN, Engine
from node.mlx.probe.probe import fit_engine
from tests.support.tiny_models import LLAMA, build_model


class Spoiled:
    """A model some of whose logits are what they should not be."""

    def __init__(self, model, value, count):
        self.model, self.value, self.count = model, value, count

    def __call__(self, *args, **options):
        logits = self.model(*args, **options)
        hit = mx.arange(logits.shape[-1]) < self.count
        return mx.where(hit, mx.array(self.value), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [100, LLAMA["vocab_size"]], ids=["some", "all"])
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_what_is_no_number_is_nearly_impossible(value, count, temperature):
    """Masked tokens, and caches that hold infinities: finite, and never above zero."""
    engine = fit_engine(build_model(LLAMA), KvBits())
    spoiled = Engine(Spoiled(engine.model, value, count), engine.spec, limits=engine.limits)
    cache = spoiled.new_cache(8)
    spoiled.prefill(cache, [5, 6])
    sampling = Sampling(temperature=temperature, logprobs=20, logit_bias={"7": 1.0})
    slot = spoiled.start(cache, [5, 6, 7], sampling, 0)
    for _ in range(3):
        spoiled.launch([slot])
    tops = [logprob for drawn in spoiled.read(slot) for _, logprob in drawn.top]

    assert len(tops) == 2 * 21
    assert all(LOGPROB_MIN <= logprob <= 0 for logprob in tops)
