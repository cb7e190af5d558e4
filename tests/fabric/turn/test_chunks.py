"""Content-defined cuts: shared text is cut alike at any position."""

import random

from fabric.limits import SPAN_CHUNK_TOKENS_MAX, SPAN_CHUNK_TOKENS_MIN
from fabric.turn.chunks import as_tokens, chunk_digest, chunks

SPECIAL = 7
SALT, OTHER = b"s" * 32, b"t" * 32


def random_ids(seed, count):
    return random.Random(seed).choices(range(100, 50_000), k=count)


def digests(ids, salt=SALT):
    tokens = as_tokens(ids)
    return {chunk_digest(salt, tokens[a:b]) for a, b in chunks(tokens, {SPECIAL})}


def test_chunks_are_bounded_ordered_and_begin_at_special_tokens():
    ids = [*random_ids(1, 700), SPECIAL, *random_ids(2, 5), SPECIAL, *random_ids(3, 900)]
    found = chunks(as_tokens(ids), {SPECIAL})
    ends = [0, *(end for _, end in found)]
    for (start, end), before in zip(found, ends, strict=False):
        assert before <= start
        assert 0 < end - start <= SPAN_CHUNK_TOKENS_MAX
        assert SPECIAL not in ids[start + 1 : end]
    lengths = [end - start for start, end in found]
    assert sum(length >= SPAN_CHUNK_TOKENS_MIN for length in lengths) >= len(lengths) - 2
    assert (700, 701) not in found
    assert 706 in {start for start, _ in found}


def test_shared_text_is_chunked_alike_after_its_first_chunks():
    shared = random_ids(4, 1_000)
    one = digests([*random_ids(5, 333), *shared, *random_ids(6, 100)])
    other = digests([SPECIAL, *random_ids(7, 78), *shared])
    assert len(one & other) > 0.7 * len(digests(shared))


def test_chunk_digests_differ_between_tenants():
    ids = random_ids(8, 400)
    assert not digests(ids) & digests(ids, OTHER)


def test_short_and_empty_texts_have_no_chunks():
    for ids in ([], [1], [SPECIAL] * 40, random_ids(9, SPAN_CHUNK_TOKENS_MIN - 1)):
        assert chunks(as_tokens(ids), {SPECIAL}) == []
    assert chunks(as_tokens([3] * 300), ()) != []
