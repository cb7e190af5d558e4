"""Every kind of cache on tiny random models under batching, restoring and cutting.

Weights are random: these compare paths, bit for bit where the design requires it.
"""

from contextlib import ExitStack
from functools import cache as remembered

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from fabric.kvcache.block_chain import BlockSpan
from fabric.kvcache.cache_spec import CacheGroup, LayerKind
from fabric.kvcache.hashing import group_hash
from fabric.limits import BLOCK_TOKENS
from fabric.record.spec_file import SpecRecord, decode_spec, encode_spec
from fabric.settings import KvBits
from fabric.turn.generation import Sampling
from node.mlx.engine import Batching, Engine
from node.mlx.probe.probe import fit_engine
from tests.support.architectures import ARCHITECTURES, WINDOW_TOKENS
from tests.support.blocks import FINGERPRINT
from tests.support.cache_paths import (
    GRID,
    STEPS,
    Shelf,
    extend,
    logits_after,
    prefilled,
    prompt_of,
    shelf_at,
)
from tests.support.samples import sample
from tests.support.tiny_models import build_model

GREEDY = Sampling(max_tokens=STEPS)
CLASSES = ("llama_80", "gemma4_text", "gpt_oss", "deepseek_v2", "glm_moe_dsa", "kimi_linear")
EVERY = pytest.mark.parametrize(
    "name", sample(ARCHITECTURES, "llama_80", "gemma4_text", "kimi_linear")
)
ONE_OF_EACH_CLASS = pytest.mark.parametrize("name", sample(CLASSES, "gpt_oss"))


@remembered
def engine_of(name: str) -> Engine:
    return fit_engine(build_model(ARCHITECTURES[name]), KvBits())


def generate(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Decode all prompts in one batch."""
    slots = [engine.start(prefilled(engine, p[:-1]), p, GREEDY, 0) for p in prompts]
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(STEPS):
        engine.launch(engine.prepare(slots))
        for tokens, slot in zip(out, slots, strict=True):
            tokens.append(engine.read(slot).token)
    return out


@EVERY
def test_batched_equals_alone(name):
    """Three sequences of unequal length; and as many as key heads, which broadcasts wrongly."""
    engine = engine_of(name)
    slots = [slot for layer in engine.spec.layers for slot in layer.slots]
    prompts = [prompt_of(count) for count in (100, 3, 47, 31)]
    alone = [generate(engine, [prompt])[0] for prompt in prompts]

    assert engine.batching is not Batching.ALONE
    for size in {3, *(slot.heads for slot in slots if 1 < slot.heads <= len(prompts))}:
        assert generate(engine, prompts[:size]) == alone[:size]


@ONE_OF_EACH_CLASS
def test_sequences_may_leave_and_join_a_batch(name):
    """In any batch, every sequence gets the tokens that it gets alone."""
    engine = engine_of(name)
    prompts = [prompt_of(count, seed=1) for count in (40, 21, 66)]
    alone = [generate(engine, [prompt])[0] for prompt in prompts]
    slots = [engine.start(prefilled(engine, p[:-1]), p, GREEDY, 0) for p in prompts]
    out: list[list[int]] = [[] for _ in prompts]

    for step in ((0, 1), (0, 1), (0, 1, 2), (2, 0), (2, 1, 0), (1, 2), (1,), (2, 0), (0, 1, 2)):
        engine.launch(engine.prepare([slots[index] for index in step]))
        for index in step:
            out[index].append(engine.read(slots[index]).token)

    assert [tokens[: len(want)] for tokens, want in zip(out, alone, strict=True)] == [
        want[: len(tokens)] for tokens, want in zip(out, alone, strict=True)
    ]
    assert min(map(len, out)) >= STEPS - 1


@pytest.mark.parametrize(
    "name",
    sample(["llama", "qwen3", "glm4_moe", "minimax_m2", "deepseek_v2"], "qwen3", "deepseek_v2"),
)
def test_tokens_equal_mlx_lm_with_its_own_quantized_cache(name):
    engine, prompt = engine_of(name), prompt_of(90)
    caches = [QuantizedKVCache(64, 4) for _ in engine.spec.layers]
    for chunk in (prompt[:20], prompt[20:40], prompt[40:-1]):
        engine.model(mx.array([chunk]), cache=caches)
    token, want = mx.array([prompt[-1:]]), []
    for _ in range(STEPS):
        token = mx.argmax(engine.model(token, cache=caches)[:, -1], axis=-1, keepdims=True)
        want.append(int(token.item()))

    assert generate(engine, [prompt]) == [want]


@pytest.fixture
def shelf_for(tmp_path):
    with ExitStack() as stack:

        def make(engine: Engine) -> Shelf:
            return stack.enter_context(shelf_at(tmp_path, engine))

        yield make


@EVERY
def test_restored_equals_never_evicted(name, shelf_for):
    """From disk, at any cut: the logits of the next tokens are equal bit for bit."""
    engine, prompt = engine_of(name), prompt_of(GRID[-1])
    shelf = shelf_for(engine)
    saved = shelf.save(prefilled(engine, prompt), prompt)

    assert GRID[0] < WINDOW_TOKENS < GRID[1] < BLOCK_TOKENS < GRID[2]
    for cut in GRID:
        undisturbed = prefilled(engine, prompt[:cut])
        restored = engine.new_cache(len(prompt) + 64)

        assert shelf.restore(restored, prompt, saved, cut) == cut
        following = prompt_of(4, seed=cut)
        want = logits_after(engine, undisturbed, following)
        assert np.array_equal(logits_after(engine, restored, following), want)


@EVERY
def test_warm_equals_cold_at_a_safe_cut(name, shelf_for):
    """The rest of a prompt computed on restored blocks equals that of a cold prompt."""
    engine, prompt = engine_of(name), prompt_of(GRID[-1], seed=3)
    shelf = shelf_for(engine)
    cold = prefilled(engine, prompt)
    saved = shelf.save(cold, prompt)
    warm = engine.new_cache(len(prompt) + 64)
    shelf.restore(warm, prompt, saved, GRID[1])
    extend(engine, warm, prompt)

    want = logits_after(engine, cold, prompt_of(3))
    assert np.array_equal(logits_after(engine, warm, prompt_of(3)), want)
    assert bytes(warm.gather(0, len(prompt))) == bytes(cold.gather(0, len(prompt)))


WINDOWED = [n for n in ARCHITECTURES if "gemma" in n or n == "gpt_oss"]


@pytest.mark.parametrize("name", sample(WINDOWED, "gemma4_text"))
def test_window_layers_are_bounded_and_read_only_their_last_blocks(name, shelf_for):
    """Hot memory does not grow with the context, and a restore opens few window blocks."""
    engine, prompt = engine_of(name), prompt_of(1_100)
    cache = prefilled(engine, prompt)
    shelf = shelf_for(engine)
    saved = shelf.save(cache, prompt)
    cache.slid.clear()
    cache.rest()
    full_bytes = sum(leaf.nbytes for leaf in cache.leaves if leaf.spec.group is CacheGroup.FULL)
    opened = []
    load_into = shelf.blocks.load_into
    shelf.blocks.load_into = lambda ref, *rest: (opened.append(ref.group), load_into(ref, *rest))
    restored = engine.new_cache(len(prompt))

    assert shelf.restore(restored, prompt, saved) == len(prompt)
    assert opened.count(CacheGroup.WINDOW) == 1
    assert opened.count(CacheGroup.FULL) == -(-len(prompt) // BLOCK_TOKENS)
    per_token = engine.spec.kv_bytes(1, CacheGroup.WINDOW)
    assert cache.size_bytes - full_bytes <= (WINDOW_TOKENS + 2 * BLOCK_TOKENS) * per_token
    assert cache.tokens_count == 1_100


@pytest.mark.parametrize(
    "name", sample([*WINDOWED, "qwen3_next", "kimi_linear"], "gemma3_text", "kimi_linear")
)
def test_damaged_window_or_state_restores_a_shorter_prefix(name, shelf_for):
    """A lost window block or state costs tokens, never a wrong answer."""
    engine, prompt = engine_of(name), prompt_of(GRID[-1])
    shelf = shelf_for(engine)
    saved = shelf.save(prefilled(engine, prompt), prompt)
    states = (state for state in saved.states if state.end == len(prompt))
    last = [*saved.windows, *states][-1].block
    path = next(shelf.blocks._disk.root.rglob(f"{last.name}*"))
    raw = bytearray(path.read_bytes())
    raw[-2_000] ^= 1
    path.write_bytes(raw)
    restored = engine.new_cache(len(prompt) + 64)

    loaded = shelf.restore(restored, prompt, saved)

    assert 0 < loaded < len(prompt)
    want = logits_after(engine, prefilled(engine, prompt[:loaded]), prompt_of(3))
    if loaded in GRID:
        assert np.array_equal(logits_after(engine, restored, prompt_of(3)), want)
    else:
        got = logits_after(engine, restored, prompt_of(3))
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("name", sample(WINDOWED, "gpt_oss"))
def test_cache_without_restorable_blocks_is_as_new(name, shelf_for):
    """The windows of a long context are lost: it is computed from its first token again."""
    engine, prompt = engine_of(name), prompt_of(600)
    shelf = shelf_for(engine)
    saved = shelf.save(prefilled(engine, prompt), prompt)
    saved = saved.with_lost_blocks({saved.windows[0].block})  # a full disk evicts old ones first
    for place in saved.windows:
        path = next(shelf.blocks._disk.root.rglob(f"{place.block.name}*"))
        raw = bytearray(path.read_bytes())
        raw[-2_000] ^= 1
        path.write_bytes(raw)
    emptied = engine.new_cache(len(prompt) + 64)

    assert shelf.restore(emptied, prompt, saved) == 0
    extend(engine, emptied, prompt)
    want = logits_after(engine, prefilled(engine, prompt), prompt_of(3))
    assert np.array_equal(logits_after(engine, emptied, prompt_of(3)), want)


@ONE_OF_EACH_CLASS
def test_failed_step_changes_no_cache(name, monkeypatch):
    """A step that fails in the last layer leaves every sequence unchanged."""
    engine, prompts = engine_of(name), [prompt_of(count) for count in (33, 34)]
    caches = [prefilled(engine, prompt) for prompt in prompts]
    undisturbed = [prefilled(engine, prompt) for prompt in prompts]
    tokens = [mx.array([5], mx.uint32)] * 2
    engine.feed(caches, tokens)
    engine.feed(undisturbed, tokens)
    slots = [engine.start(c, [*p, 5, 9], GREEDY, 0) for c, p in zip(caches, prompts, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr("node.mlx.engine._sampled_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.launch(engine.prepare(slots))

    assert [cache.tokens_count for cache in caches] == [34, 35]
    got = np.array(engine.feed(caches, [mx.array([7], mx.uint32)] * 2))
    assert np.array_equal(got, np.array(engine.feed(undisturbed, [mx.array([7], mx.uint32)] * 2)))


@pytest.mark.nightly
def test_spec_describes_the_layer_kinds():
    kinds = {name: {layer.kind for layer in engine_of(name).spec.layers} for name in ARCHITECTURES}
    full, window, latent = LayerKind.FULL, LayerKind.WINDOW, LayerKind.LATENT
    indexed, recurrent = LayerKind.INDEXED, LayerKind.RECURRENT

    assert kinds["llama"] == kinds["deepseek_v2"] == kinds["llama_80"] == {full}
    assert kinds["gpt_oss"] == kinds["gemma3_text"] == kinds["gemma4_text"] == {full, window}
    assert kinds["deepseek_v3"] == kinds["kimi_k2"] == kinds["glm4_moe_lite"] == {latent}
    assert kinds["deepseek_v32"] == kinds["glm_moe_dsa"] == {latent, indexed}
    assert kinds["qwen3_next"] == kinds["qwen3_5"] == {full, recurrent}
    assert kinds["kimi_linear"] == {latent, recurrent}
    assert engine_of("gemma4_text").spec.sharing_count == 4
    assert all(layer.has_sinks for layer in engine_of("gpt_oss").spec.layers)
    widths = [layer.slots[0].stored_width for layer in engine_of("llama_80").spec.layers]
    assert widths == [96] * 4
    assert engine_of("llama_112").spec.layers[0].slots[0].stored_width == 128


def test_group_hashes_do_not_collide():
    span = BlockSpan(0, 256, b"p" * 32, b"h" * 32)
    names = {group_hash(b"k" * 32, span.block_hash, group) for group in CacheGroup}
    assert len(names) == len(CacheGroup)


@EVERY
def test_spec_round_trips(name):
    """The spec file beside the blocks gives an offline check their whole layout."""
    record = SpecRecord(FINGERPRINT, name, engine_of(name).spec)
    assert decode_spec(encode_spec(record)) == record
