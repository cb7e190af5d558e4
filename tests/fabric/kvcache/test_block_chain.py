"""Names of blocks cover all that determines their contents: tokens, and edits before them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.kvcache.block_chain import UNEDITED, BlockSpan, EditLineage, block_spans, span_ending
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from tests.support.blocks import FINGERPRINT, SALT

TOKENS = list(range(5 * BLOCK_TOKENS - 7))
ENDS = st.integers(1, len(TOKENS))


def _lineage(start: int, letter: bytes = b"e") -> EditLineage:
    return EditLineage(start, letter * 32)


def _spans(lineage: EditLineage = UNEDITED, count: int = len(TOKENS)) -> tuple[BlockSpan, ...]:
    return block_spans(SALT, FINGERPRINT, TOKENS[:count], lineage=lineage)


def _names(spans: tuple[BlockSpan, ...]) -> list[bytes]:
    groups = [span.in_group(SALT, group) for span in spans for group in CacheGroup]
    return [span.block_hash for span in groups]


@given(st.integers(0, len(TOKENS) - 1))
def test_edits_change_the_hashes_of_later_blocks(start: int) -> None:
    """The hashes change in every group, from the end of the edits on."""
    plain, edited = _spans(), _spans(_lineage(start))
    assert not set(_names(edited)) & set(_names(plain))
    assert not {span.parent for span in edited} & {span.parent for span in plain}
    assert (edited[0].start, edited[-1].end) == (start, len(TOKENS))
    assert all(span.end - span.start == BLOCK_TOKENS for span in edited[:-1])


def test_block_hashes_depend_on_edit_lineage() -> None:
    """Two edit histories with the same resulting tokens share no block behind the edits."""
    one, other = _spans(_lineage(300)), _spans(_lineage(300, b"o"))
    assert not set(_names(one)) & set(_names(other))
    assert one == _spans(_lineage(300))


@given(ENDS, st.integers(0, len(TOKENS) - 1), st.booleans())
def test_partial_block_is_hashed_like_last_block_of_shorter_prompt(
    end: int, start: int, is_edited: bool
) -> None:
    """A state within a block has the same name, whether or not more tokens follow."""
    lineage = _lineage(min(start, end - 1)) if is_edited else UNEDITED
    found = span_ending(SALT, FINGERPRINT, TOKENS, _spans(lineage), end, lineage)
    assert found == _spans(lineage, end)[-1]


@pytest.mark.parametrize("known", [UNEDITED, _lineage(0), _lineage(300), _lineage(300, b"o")])
@pytest.mark.parametrize("lineage", [UNEDITED, _lineage(300)])
def test_known_hashes_of_other_lineages_are_not_reused(
    known: EditLineage, lineage: EditLineage
) -> None:
    """Hashes are not reused, however many tokens the lineages have in common."""
    count = len(TOKENS)
    found = block_spans(SALT, FINGERPRINT, TOKENS, _spans(known), count, lineage)
    assert found == _spans(lineage)
