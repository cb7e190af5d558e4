"""Numbers of a record have lower and upper bounds, in records of any source."""

import math
from dataclasses import replace

import pytest

from fabric.errors import CorruptDataError
from fabric.limits import (
    EPOCH_ERASED_MAX,
    MIB,
    SKETCH_PIECES_MAX,
    TEXT_SLACK_BYTES,
    TOKEN_TEXT_BYTES_MAX,
    WALL_S_MAX,
)
from fabric.record.manifest import decode_manifest, encode_manifest
from fabric.record.stored_part import truncate_record
from tests.support.blocks import make_block, make_manifest, sealed_unchecked

RECORD = make_manifest([make_block(1, 256), make_block(2, 127)])
TIMES = [-1.0, -math.inf, math.inf, math.nan, 1e308, math.nextafter(WALL_S_MAX, math.inf)]
LONG = "A" * 30 * MIB


def _with_text(text, last_end):
    return replace(RECORD, text=text, token_ends=(*RECORD.token_ends[:-1], last_end))


WRONG = {
    "text beyond the last token": replace(RECORD, text=LONG),
    "a token of 30 MiB": _with_text(LONG, len(LONG)),
    "no token has any text": replace(RECORD, text=LONG, token_ends=(0,) * RECORD.tokens_count),
    "NULs beyond the last token": replace(
        RECORD, text=RECORD.text + "\0" * (TOKEN_TEXT_BYTES_MAX + 1)
    ),
    "text without tokens": replace(make_manifest([]), text=LONG),
    "an end past the text": _with_text(RECORD.text, len(RECORD.text) + 1),
    "epoch 0": replace(RECORD, epoch=0),
    "an epoch that no erasure reaches": replace(RECORD, epoch=EPOCH_ERASED_MAX + 1),
    "a revision out of range": replace(RECORD, revision=EPOCH_ERASED_MAX + 1),
    "an endless sketch": replace(RECORD, sketch=(1,) * (SKETCH_PIECES_MAX + 1)),
    "a sketch of more than hashes": replace(RECORD, sketch=(1 << 64,)),
    **{f"created at {time}": replace(RECORD, created_s=time) for time in TIMES},
    **{f"used at {time}": replace(RECORD, used_s=time) for time in TIMES},
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_records_are_neither_written_nor_read(name):
    with pytest.raises(CorruptDataError):
        encode_manifest(WRONG[name])
    try:
        raw = sealed_unchecked(WRONG[name])
    except OverflowError:
        return  # no message can hold it
    with pytest.raises(CorruptDataError):
        decode_manifest(raw)


def test_text_held_back_from_last_token_belongs_to_record():
    """A detokenizer may emit the last token's text only when the answer ends."""
    held = replace(RECORD, text=RECORD.text + "é" * (TOKEN_TEXT_BYTES_MAX // 2))
    assert decode_manifest(encode_manifest(held)) == held


def test_text_up_to_the_limit_is_accepted():
    size_bytes = TEXT_SLACK_BYTES + RECORD.tokens_count * TOKEN_TEXT_BYTES_MAX
    longest = _with_text("x" * size_bytes, size_bytes)
    assert decode_manifest(encode_manifest(longest)) == longest
    with pytest.raises(CorruptDataError):
        encode_manifest(_with_text("x" * (size_bytes + 1), size_bytes + 1))


def test_offered_blocks_need_no_text():
    bare = replace(RECORD, text="", token_ends=(0,) * RECORD.tokens_count, prompt_tokens_count=0)
    assert decode_manifest(encode_manifest(bare)) == bare


def test_truncated_record_is_writable():
    """Tokens with held-back text have equal ends, so the first of them may end beyond the bound."""
    size_bytes = TEXT_SLACK_BYTES + 300 * TOKEN_TEXT_BYTES_MAX
    ends = (*range(1, 11), *(size_bytes,) * (RECORD.tokens_count - 10))
    record = replace(RECORD, text="x" * size_bytes, token_ends=ends)
    cut = truncate_record(record, {record.refs[-1]})
    assert decode_manifest(encode_manifest(cut)) == cut
    assert (cut.tokens_count, cut.text) == (0, "")
