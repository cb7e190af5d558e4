"""Batches of quantized caches: codes against lists of sequences, attention against numpy."""

import copy
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from node.mlx.batch_quantized_cache import BatchQuantizedKVCache, MergeableQuantizedKVCache
from node.mlx.packed_product import PACKED_QUERIES_MAX
from node.mlx.token_store import GROWTH_TOKENS

HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 64, 128
FORMATS = [
    (4, 64, mx.float32),
    (8, 32, mx.float16),
    (4, 32, mx.bfloat16),
    (8, 64, mx.float32),
]
TOKENS_MAX = 8_192
VECTORS = np.float32(np.random.default_rng(0).integers(-99, 99, (TOKENS_MAX, HEADS, VALUE_WIDTH)))


# --- codes -----------------------------------------------------------------------------------


class Sequences:
    """A batch as plain lists: per sequence the number drawn for each of its tokens."""

    def __init__(self, bits, group_size, dtype, dequantized):
        self.bits, self.group_size, self.dtype = bits, group_size, dtype
        self.dequantized = dequantized
        self.drawn = 0

    @property
    def token(self):
        """Return the arrays of one token."""
        return *self.quantized([0], KEY_WIDTH), *self.quantized([0], VALUE_WIDTH)

    def draw(self, count):
        self.drawn += count
        return list(range(self.drawn - count, self.drawn))

    def vectors(self, numbers, width):
        """Make `[1, heads, n, width]`: each token's vector follows from its number alone."""
        rows = VECTORS[np.array(numbers, int), :, :width]
        return mx.array(rows.transpose(1, 0, 2)[None]).astype(self.dtype)

    def quantized(self, numbers, width):
        vectors = self.vectors(numbers, width)
        return mx.quantize(vectors, group_size=self.group_size, bits=self.bits)

    def keys_and_values(self, rows):
        """Return the arrays that a model appends for rows of equal length."""
        widths = KEY_WIDTH, VALUE_WIDTH
        return [mx.concatenate([self.vectors(row, width) for row in rows]) for width in widths]

    def merged(self, rows):
        """Merge one cache per row, quantized and by mlx-lm's own classes."""
        mine = [self.quantized_cache() for _ in rows]
        native = [KVCache() for _ in rows]
        for row, *caches in zip(rows, mine, native, strict=True):
            for cache in caches if row else []:
                cache.update_and_fetch(*self.keys_and_values([row]))
        return BatchQuantizedKVCache.merge(mine), BatchKVCache.merge(native)

    def quantized_cache(self):
        return MergeableQuantizedKVCache(self.group_size, self.bits, dequantized=self.dequantized)

    def feed(self, batches, rows):
        """Append unequal numbers of tokens to the batches' rows, as a prefill does."""
        longest = max(map(len, rows))
        padding = [longest - len(row) for row in rows]
        padded = [row + self.draw(pad) for row, pad in zip(rows, padding, strict=True)]
        for batch in batches:
            batch.prepare(lengths=[len(row) for row in rows], right_padding=padding)
            batch.update_and_fetch(*self.keys_and_values(padded))
            batch.finalize()


def equal(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.all(a == b))


def check_holds(world, cache, numbers):
    """Check that the cache holds these tokens, each with the codes that mx.quantize gives it."""
    assert cache.size() == cache.offset == len(numbers)
    if not numbers:
        return
    for held, width in ((cache.keys, KEY_WIDTH), (cache.values, VALUE_WIDTH)):
        expected = world.quantized(numbers, width)
        assert all(equal(a[:, :, : len(numbers)], b) for a, b in zip(held, expected, strict=True))


def check_batch(world, batch, native, rows):
    """Check that every row has its tokens in the columns of mlx-lm's unquantized batch.

    Models apply one layer's mask to others, so the columns must be the same.
    """
    assert batch.offset.tolist() == native.offset.tolist() == [len(row) for row in rows]
    assert batch.left_padding.tolist() == native.left_padding.tolist()
    assert batch.size() == native.size()
    mask, native_mask = (b.make_mask(3, return_array=True) for b in (batch, native))
    assert bool(mx.all(mask == native_mask))
    for index, row in enumerate(rows):
        one = batch.extract(index)
        check_holds(world, one, row)
        assert one.nbytes == len(row) * sum(a.nbytes for a in world.token), "keeps padding alive"


def step(rng, world, batches, rows):
    """Change the quantized batch, mlx-lm's and the lists in the same random way."""
    action = rng.choice(["decode", "feed", "filter", "extend", "split", "trim", "remake"])
    if action in {"decode", "feed"} or not any(rows):
        counts = [1] if action == "decode" else [1, 7, 70, 120]
        more = [world.draw(rng.choice(counts)) for _ in rows]
        world.feed(batches, more)
        return batches, [row + new for row, new in zip(rows, more, strict=True)]
    if action == "filter":
        keep = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
        for batch in batches:
            batch.filter(keep)
        return batches, [rows[index] for index in keep]
    if action == "extend":
        joining = [world.draw(rng.choice([0, 1, 40])) for _ in range(rng.randint(1, 2))]
        for batch, other in zip(batches, world.merged(joining), strict=True):
            batch.extend(other)
        return batches, rows + joining
    if action == "split" and len(rows) > 1:
        # What mlx-lm does when some prompts are done: a deep copy, and each half filtered.
        cut = rng.randint(1, len(rows) - 1)
        others = copy.deepcopy(batches)
        for batch, other in zip(batches, others, strict=True):
            batch.filter(list(range(cut)))
            other.filter(list(range(cut, len(rows))))
            other.extend(batch)
        return others, rows[cut:] + rows[:cut]
    if action == "trim":
        count = rng.randint(0, min(map(len, rows)))
        assert [batch.trim(count) for batch in batches] == [count, count]
        return batches, [row[: len(row) - count] for row in rows]
    remade = [
        type(batch).merge([batch.extract(index) for index in range(len(rows))]) for batch in batches
    ]
    return remade, rows


@pytest.mark.parametrize("dequantized", [False, True])
@pytest.mark.parametrize(("bits", "group_size", "dtype"), FORMATS)
def test_codes_follow_their_sequences_through_random_operations(
    bits, group_size, dtype, dequantized
):
    rng = random.Random(f"{bits} {group_size} {dequantized}")
    for _ in range(3):
        world = Sequences(bits, group_size, dtype, dequantized)
        rows = [world.draw(count) for count in (9, 0, 30)]
        batches = world.merged(rows)
        for _ in range(12):
            batches, rows = step(rng, world, batches, rows)
            check_batch(world, *batches, rows)


def test_trim_past_the_start_of_a_row_leaves_it_empty():
    world = Sequences(4, 64, mx.float32, dequantized=False)
    short, long, more = world.draw(3), world.draw(10), [world.draw(2), world.draw(2)]
    batch, _ = world.merged([short, long])

    assert batch.trim(5) == 5

    check_holds(world, batch.extract(0), [])
    world.feed([batch], more)
    check_holds(world, batch.extract(0), more[0])
    check_holds(world, batch.extract(1), long[:5] + more[1])
    assert batch.trim(100) == 7
    assert batch.size() == 0


def test_appending_past_growth_steps_keeps_held_rows():
    world = Sequences(4, 64, mx.float32, dequantized=False)
    single, row = world.quantized_cache(), []
    for count in (GROWTH_TOKENS - 1, 1, 1, GROWTH_TOKENS + 3, 1):
        new = world.draw(count)
        single.update_and_fetch(*world.keys_and_values([new]))
        row += new
        check_holds(world, single, row)
        assert single.keys[0].shape[2] % GROWTH_TOKENS == 0
        assert single.trim(2) == 2
        row = row[:-2]
    native = QuantizedKVCache(64, 4)
    native.update_and_fetch(*world.keys_and_values([row]))
    assert single.nbytes == native.nbytes


@pytest.mark.parametrize("width", [(KEY_WIDTH, 80), (80, VALUE_WIDTH)])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_cannot_be_quantized_change_nothing(rows, width):
    world = Sequences(4, 64, mx.float32, dequantized=False)
    held = [world.draw(GROWTH_TOKENS) for _ in range(rows)]  # the next token needs room
    batch, _ = world.merged(held)
    cache = batch if rows > 1 else batch.extract(0)
    bad = [mx.zeros((rows, HEADS, 1, w)) for w in width]
    with pytest.raises(ValueError, match="quantize"):
        cache.update_and_fetch(*bad)
    with pytest.raises(ValueError, match="cannot append"):
        cache.update_and_fetch(*(mx.zeros((rows, 1, 1, w)) for w in (KEY_WIDTH, VALUE_WIDTH)))
    with pytest.raises(ValueError, match="cannot append"):
        cache.update_and_fetch(*(mx.zeros((3, HEADS, 1, w)) for w in (KEY_WIDTH, VALUE_WIDTH)))
    with pytest.raises(ValueError, match="cannot append"):
        cache.update_and_fetch(*(mx.zeros((rows, HEADS, 1, 64)) for _ in range(2)))

    for index, numbers in enumerate(held):
        check_holds(world, cache.extract(index) if rows > 1 else cache, numbers)


def test_incompatible_caches_are_refused_and_unchanged():
    world = Sequences(4, 64, mx.float32, dequantized=False)
    batch, _ = world.merged([world.draw(3)])
    others = [
        Sequences(8, 64, mx.float32, dequantized=False),
        Sequences(4, 32, mx.float32, dequantized=False),
        Sequences(4, 64, mx.float16, dequantized=False),
        Sequences(4, 64, mx.float32, dequantized=True),
    ]
    for other in others:
        with pytest.raises(ValueError, match="cannot join"):
            batch.extend(other.merged([[0]])[0])
    for stranger in (KVCache(), QuantizedKVCache()):
        with pytest.raises(ValueError, match="cannot join"):
            MergeableQuantizedKVCache.merge([batch.extract(0), stranger])
    with pytest.raises(ValueError, match="cannot join"):
        batch.extend(BatchKVCache([0]))
    check_holds(world, batch.extract(0), [0, 1, 2])


def test_empty_batches_merge_filter_extend_and_extract():
    world = Sequences(4, 64, mx.float32, dequantized=False)
    batch, _ = world.merged([[], []])
    assert batch.empty()
    assert batch.nbytes == 0
    mx.eval(batch.state)
    batch.finalize()
    batch.filter([1])
    check_holds(world, batch.extract(0), [])
    batch.extend(world.merged([[]])[0])
    row = world.draw(4)
    batch.extend(world.merged([row])[0])
    assert batch.left_padding.tolist() == [4, 4, 0]
    emptied = Sequences(4, 64, mx.float16, dequantized=False).merged([[0]])[0].extract(0)
    assert emptied.trim(1) == 1
    batch = BatchQuantizedKVCache.merge([emptied, batch.extract(2)])
    for index, numbers in enumerate([[], row]):
        check_holds(world, batch.extract(index), numbers)
    batch.filter([])
    assert batch.empty()
    batch.extend(world.merged([row])[0])
    check_holds(world, batch.extract(0), row)
    assert batch.offset.tolist() == [4]


def test_left_padding_is_accepted_before_the_first_token_only():
    world = Sequences(4, 64, mx.float32, dequantized=False)
    batch = BatchQuantizedKVCache([0, 1], 64, 4)
    batch.prepare(left_padding=[2, 0])
    assert batch.offset.tolist() == [-2, -1]
    rows = [world.draw(5), world.draw(5)]
    batch.update_and_fetch(*world.keys_and_values(rows))
    check_holds(world, batch.extract(0), rows[0][2:])
    check_holds(world, batch.extract(1), rows[1][1:])
    with pytest.raises(ValueError, match="left padding"):
        batch.prepare(left_padding=[1, 1])


@pytest.mark.parametrize("single", [False, True])
def test_cache_built_from_anothers_state_is_independent(single):
    world = Sequences(4, 64, mx.float32, dequantized=False)
    row, mine, yours = world.draw(20), world.draw(1), world.draw(1)
    first, _ = world.merged([row])
    first = first.extract(0) if single else first
    second = type(first).from_state(first.state)
    first.update_and_fetch(*world.keys_and_values([mine]))
    second.update_and_fetch(*world.keys_and_values([yours]))

    for cache, new in ((first, mine), (second, yours)):
        check_holds(world, cache if single else cache.extract(0), row + new)


# --- attention -------------------------------------------------------------------------------


def attend(queries, keys, values):
    """Attend causally in float64, `[heads, n, width]`, the last query at the last key."""
    repeats = queries.shape[0] // keys.shape[0]
    keys, values = np.repeat(keys, repeats, 0), np.repeat(values, repeats, 0)
    scores = queries @ keys.transpose(0, 2, 1)
    n, columns = scores.shape[1:]
    future = np.arange(columns) > np.arange(columns - n, columns)[:, None]
    weights = np.exp(np.where(future, -np.inf, scores))
    return weights / weights.sum(-1, keepdims=True) @ values


def dense(cache, triple):
    array = mx.dequantize(*triple, group_size=cache.group_size, bits=4)
    return np.array(array[0, :, : cache.offset], np.float64)


@pytest.mark.parametrize("dequantized", [False, True])
@pytest.mark.parametrize("n", [1, 3, PACKED_QUERIES_MAX, PACKED_QUERIES_MAX + 1])
@pytest.mark.parametrize(("kv_heads", "repeats"), [(2, 1), (4, 1), (2, 2), (1, 2), (2, 4), (4, 2)])
def test_batched_attention_equals_each_sequence_alone(kv_heads, repeats, n, dequantized):
    """A mask without its head axis would fit, wrongly, where the batch is as large as the heads."""
    heads = kv_heads * repeats
    value_width = 64 if repeats > 1 else 128  # mlx-lm's packed attention needs one width for both
    rng = np.random.default_rng(heads)
    normal = lambda *shape: mx.array(rng.normal(size=shape), mx.float32)  # noqa: E731
    for rows in sorted({kv_heads, heads, repeats}):
        for lengths in ([7] * rows, [5 * row for row in range(rows)]):
            singles = [
                MergeableQuantizedKVCache(32, 4, dequantized=dequantized) for _ in range(rows)
            ]
            for cache, length in zip(singles, lengths, strict=True):
                if length:
                    cache.update_and_fetch(
                        normal(1, kv_heads, length, 64), normal(1, kv_heads, length, value_width)
                    )
            batch = MergeableQuantizedKVCache.merge(singles)
            assert hasattr(batch, "bits") != dequantized
            mask = create_attention_mask(mx.zeros((rows, n, 1)), batch)
            queries = normal(rows, heads, n, 64)
            exact_queries = np.array(queries, np.float64) * 0.2
            keys, values = batch.update_and_fetch(
                normal(rows, kv_heads, n, 64), normal(rows, kv_heads, n, value_width)
            )
            packed = n <= PACKED_QUERIES_MAX and not dequantized
            assert hasattr(batch, "bits") == isinstance(keys, tuple) == packed

            out = scaled_dot_product_attention(queries, keys, values, batch, 0.2, mask)

            for row in range(rows):
                one = batch.extract(row)
                assert one.offset == lengths[row] + n
                expected = attend(exact_queries[row], dense(one, one.keys), dense(one, one.values))
                np.testing.assert_allclose(np.array(out[row]), expected, atol=2e-5)
