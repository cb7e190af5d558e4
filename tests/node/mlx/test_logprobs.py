import mlx.core as mx
import numpy as np
import pytest

from fabric.turn.generation import Sampling
from node.mlx import engine, sampling
from node.mlx.loaded_model import load_model
from node.mlx.sampling import LOGPROB_MIN, likeliest, score_tokens
from tests.support.tiny_models import ONE_LAYER, write_model

LOGITS = mx.array(np.random.default_rng(0).normal(size=(5, 40)) * 4, mx.float32)
FOLLOWING = [3, 0, 39, 7, 7]


def log_softmax(row):
    row = np.array(row, np.float64)
    return row - np.log(np.exp(row).sum())


@pytest.mark.parametrize("count", [0, 1, 3, 40, 99])
def test_every_token_is_listed_with_its_likeliest_alternatives(count):
    for row, chosen, top in zip(
        LOGITS, FOLLOWING, score_tokens(LOGITS, FOLLOWING, count), strict=True
    ):
        expected = log_softmax(row)
        assert top[0][0] == chosen
        assert top[0][1] == pytest.approx(expected[chosen], abs=1e-4)
        order = np.argsort(-expected)[: min(count, 40)]
        assert [token for token, _ in top[1:]] == list(order)
        assert [value for _, value in top[1:]] == pytest.approx(list(expected[order]), abs=1e-4)


def test_prompt_tokens_are_scored_like_answer_tokens():
    exact_rows = LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True)
    for at, top in enumerate(score_tokens(LOGITS, FOLLOWING, 4)):
        row, chosen = exact_rows[at : at + 1], FOLLOWING[at]
        (scores,) = likeliest(row, mx.array([chosen], mx.uint32), 4).read([chosen])
        assert [token for token, _ in top] == [token for token, _ in scores]
        assert [value for _, value in top] == pytest.approx([value for _, value in scores])


def test_infinite_logit_gets_the_minimum_log_probability():
    logits = mx.array([[0.0, -mx.inf, 1.0]])
    ((chosen, *others),) = score_tokens(logits, [1], 3)
    assert chosen == (1, LOGPROB_MIN)
    assert [token for token, _ in others] == [2, 0, 1]


class Forbidden:
    """A stand-in for MLX that fails on any computation."""

    def __getattr__(self, name):
        return pytest.fail(f"{name} is computed while tokens are read")


@pytest.mark.parametrize("alternatives_count", [None, 0, 5])
def test_reading_a_token_computes_nothing_on_the_device(tmp_path, monkeypatch, alternatives_count):
    loaded = load_model(str(write_model(tmp_path / "tiny", ONE_LAYER)))
    prompt, loaded_engine = [5, 9, 2], loaded.engine
    cache = loaded_engine.new_cache(64)
    loaded_engine.prefill(cache, prompt[:-1])
    slot = loaded_engine.start(cache, prompt, Sampling(logprobs=alternatives_count), 0)
    for _ in range(3):
        loaded_engine.launch(loaded_engine.prepare([slot]))
    mx.synchronize()
    for module in (engine, sampling):
        monkeypatch.setattr(module, "mx", Forbidden())
    read = loaded_engine.read(slot)

    entries_count = 0 if alternatives_count is None else 1 + alternatives_count
    assert len(read.top) == entries_count
