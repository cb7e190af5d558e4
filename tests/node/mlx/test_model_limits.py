"""No id of a request, a file or a tokenizer makes MLX read or write outside of its arrays."""

from functools import cache as remembered
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from fabric.errors import FabricError, FatalError, RejectedError
from fabric.settings import KvBits
from fabric.turn.generation import Sampling
from node.engine.sequence import Broke
from node.mlx.engine import DecodeSlot, Engine
from node.mlx.model_limits import ModelLimits, read_limits
from node.mlx.probe.probe import fit_engine
from tests.node.engine_bench import GREEDY, Bench
from tests.support.tiny_models import LLAMA, VOCABULARY, build_model, write_model

PADDED_ROWS = VOCABULARY + 64
POSITIONS = 192
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_ctx": POSITIONS,
    "n_positions": POSITIONS,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCABULARY,
}
GPT_BIGCODE: dict[str, Any] = {**GPT2, "model_type": "gpt_bigcode", "n_inner": 128}
OUTSIDE = (VOCABULARY, VOCABULARY + 1, 1 << 31, (1 << 32) - 1, 9_999_999_999)


@remembered
def engine_of(model_type: str) -> Engine:
    configs = {"llama": LLAMA, "gpt2": GPT2, "gpt_bigcode": GPT_BIGCODE}
    return fit_engine(build_model(configs[model_type]), KvBits())


def with_rows(embedding_rows: int, logits_width: int) -> Any:
    """Return a llama whose embedding and logits have these sizes, unlike its config."""
    model = build_model(LLAMA)
    model.model.embed_tokens = nn.Embedding(embedding_rows, LLAMA["hidden_size"])
    model.lm_head = nn.Linear(LLAMA["hidden_size"], logits_width, bias=False)
    mx.eval(model.parameters())
    return model


def start_slot(engine: Engine, prompt: list[int], sampling: Sampling) -> DecodeSlot:
    cache = engine.new_cache(len(prompt) + 8)
    if prompt[:-1]:
        engine.prefill(cache, prompt[:-1])
    return engine.start(cache, prompt, sampling, 0)


@pytest.mark.parametrize(
    ("rows", "width", "size"),
    [
        (VOCABULARY, VOCABULARY, VOCABULARY),
        (PADDED_ROWS, VOCABULARY, VOCABULARY),
        (VOCABULARY, PADDED_ROWS, VOCABULARY),
    ],
)
def test_vocabulary_is_the_smaller_of_embedding_and_logits(
    rows: int, width: int, size: int
) -> None:
    """Limits come from the tables' shapes, not from the config."""
    assert read_limits(with_rows(rows, width)) == ModelLimits(size)


def test_quantized_tables_are_measured_too() -> None:
    """Packing changes the columns of a table, never its rows."""
    model = with_rows(PADDED_ROWS, VOCABULARY)
    nn.quantize(model, 64, 4)

    assert read_limits(model) == ModelLimits(VOCABULARY)
    assert type(model.model.embed_tokens) is nn.QuantizedEmbedding  # unchanged


def test_guarded_smaller_table_does_not_limit_the_vocabulary() -> None:
    """Gemma 3n has fewer rows per layer, and looks ids beyond them up elsewhere."""
    model = with_rows(VOCABULARY, VOCABULARY)
    inner, small = model.model, nn.Embedding(100, LLAMA["hidden_size"])

    class Shielded(type(inner)):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, *more: Any) -> Any:
            self.small(mx.where(inputs < self.shield, inputs, 0))
            return super().__call__(inputs, *more)

    inner.small, inner.shield = small, 100
    inner.__class__ = Shielded
    assert read_limits(model).vocabulary_size == VOCABULARY
    inner.shield = VOCABULARY
    assert read_limits(model).vocabulary_size == 100


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_position_table_ends_the_context(name: str) -> None:
    """A model that looks positions up is never fed one more than it has rows."""
    engine = engine_of(name)
    assert engine.limits == ModelLimits(VOCABULARY, POSITIONS)
    cache = engine.new_cache(POSITIONS + 64)
    engine.prefill(cache, [7] * (POSITIONS - 1))

    with pytest.raises(RejectedError, match=f"{POSITIONS} positions"):
        engine.prefill(cache, [7, 7])
    assert cache.tokens_count == POSITIONS - 1
    slot = engine.start(cache, [7] * POSITIONS, GREEDY, 0)
    engine.launch(engine.prepare([slot]))
    with pytest.raises(RejectedError, match=f"{POSITIONS} positions"):
        engine.launch(engine.prepare([slot]))
    assert cache.tokens_count == POSITIONS


def test_broken_model_is_a_fatal_error_with_a_reason() -> None:
    """Exceptions of a model's own code become a FatalError."""
    model = build_model(LLAMA)
    model.model.layers[0].self_attn.q_proj = None
    with pytest.raises(FatalError, match="does not run"):
        read_limits(model)


def test_model_with_too_small_a_vocabulary_is_refused() -> None:
    """The trials' tokens would be outside of its tables."""
    with pytest.raises(FatalError, match="20 tokens"):
        fit_engine(build_model({**LLAMA, "vocab_size": 20}), KvBits())


@pytest.mark.parametrize("token", [-1, *OUTSIDE])
def test_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    """MLX would add to memory beyond the logits, such as another agent's cache."""
    with pytest.raises(RejectedError) as refused:
        start_slot(
            engine_of("llama"), [5, 6, 7], Sampling(logit_bias={"3": 1.0, str(token): 100.0})
        )
    assert refused.value.param == "logit_bias"


def test_last_token_of_the_vocabulary_can_be_biased() -> None:
    """The bound is exact, and the bias does something."""
    engine, last = engine_of("llama"), VOCABULARY - 1
    slot = start_slot(engine, [5, 6, 7], Sampling(logit_bias={str(last): 100.0}))
    engine.launch(engine.prepare([slot]))

    assert engine.read(slot).token == last


@pytest.mark.parametrize("token", [-1, *OUTSIDE])
def test_prompt_token_outside_the_vocabulary_is_refused(token: int) -> None:
    """At its start, in its middle, as its last token, and where only a penalty would read it."""
    engine = engine_of("llama")
    for prompt in ([token, 5, 6], [5, token, 6], [5, 6, token]):
        with pytest.raises(RejectedError):
            start_slot(engine, prompt, GREEDY)
    restored = engine.new_cache(8)
    engine.prefill(restored, [5, 6])
    for sampling in (Sampling(repetition_penalty=1.2), Sampling(presence_penalty=0.5), GREEDY):
        with pytest.raises(RejectedError):
            engine.start(restored, [5, token, 7], sampling, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_beyond_the_embedding_are_never_sampled(temperature: float) -> None:
    """Logits wider than the embedding: the columns beyond its rows are never chosen."""
    model = with_rows(VOCABULARY, PADDED_ROWS)
    model.lm_head.weight[VOCABULARY:] *= 1_000.0
    mx.eval(model.parameters())
    engine = Engine(model, fit_engine(build_model(LLAMA), KvBits()).spec)
    sampling = Sampling(temperature=temperature, logprobs=3, repetition_penalty=1.1)
    slots = [start_slot(engine, [5, 6, n], sampling) for n in (7, 8)]
    drawn = []
    for _ in range(8):
        engine.launch(engine.prepare(slots))
        drawn += [engine.read(slot) for slot in slots]

    named = [one.token for one in drawn] + [token for one in drawn for token, _ in one.top]
    assert len(drawn) == 16
    assert max(named) < VOCABULARY


def test_engine_thread_survives_invalid_token_ids(tmp_path) -> None:
    """Each bad sequence breaks with its own error; its neighbours are unaffected."""
    bench = Bench(write_model(tmp_path / "llama", LLAMA))
    want = bench.answer([5, 6, 7], GREEDY)
    bad = [([5, 6, 7], Sampling(logit_bias={str(token): 1.0})) for token in OUTSIDE]
    bad += [([5, token, 7], GREEDY) for token in OUTSIDE]
    events = [bench.submit(*work)[1] for work in bad]
    good = bench.answer([5, 6, 7], GREEDY)
    broken = [queue.get(timeout=60) for queue in events]
    bench.thread.stop()

    assert good == want
    assert all(isinstance(event, Broke) for event in broken)
    errors: list[FabricError] = [event.error for event in broken]
    assert {error.code for error in errors} == {"token_out_of_range"}
    assert {int(error.status) for error in errors} == {400}
