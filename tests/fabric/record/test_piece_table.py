"""A piece table agrees with a list of tokens with their origins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import CorruptDataError
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import AGENT_TOKENS_MAX, PIECES_MAX
from fabric.record.piece_table import Piece, PieceTable

Token = tuple[BlockRef, int, int]  # its block, its index there, its computed position


def _ref(number: int, tokens_count: int) -> BlockRef:
    return BlockRef(number.to_bytes(32, "big"), number.to_bytes(16, "big"), tokens_count, 100)


def _computed(sizes: list[int], first: int = 0, start: int = 0) -> tuple[PieceTable, list[Token]]:
    """Make blocks as computed from position `start` on, and the naive list of their tokens."""
    refs = [_ref(first + i, size) for i, size in enumerate(sizes)]
    items = tuple(Piece(ref, 0, ref.tokens_count, -start) for ref in refs)
    cells = [(ref, offset) for ref in refs for offset in range(ref.tokens_count)]
    tokens = [(ref, offset, start + at) for at, (ref, offset) in enumerate(cells)]
    return PieceTable(items), tokens


def _tokens(table: PieceTable) -> list[Token]:
    """List the tokens of a table's pieces."""
    tokens: list[Token] = []
    for piece in table:
        for offset in range(piece.start, piece.end):
            tokens.append((piece.block, offset, len(tokens) - piece.delta))
    return tokens


def _splice(table: PieceTable, start: int, end: int, inserted: PieceTable) -> PieceTable:
    """Replace the tokens `start:end` by `inserted`."""
    after = table.slice(end, table.tokens_count)
    return PieceTable(
        (
            *table.slice(0, start),
            *(piece.moved(start) for piece in inserted),
            *(piece.moved(start + inserted.tokens_count) for piece in after),
        )
    )


_SIZES = st.lists(st.integers(1, 9), max_size=6)


@st.composite
def _edited(draw: st.DrawFn) -> tuple[PieceTable, list[Token]]:
    """Draw a few edits of blocks, applied to a table and to a list."""
    table, tokens = _computed(draw(_SIZES))
    for number in range(draw(st.integers(0, 5))):
        start, end = _range(draw, tokens)
        inserted, new = _computed(draw(_SIZES), 100 * (number + 1), start)
        table = _splice(table, start, end, inserted)
        tokens[start:end] = new
    return table, tokens


def _range(draw: st.DrawFn, tokens: list[Token]) -> tuple[int, int]:
    start = draw(st.integers(0, len(tokens)))
    return start, draw(st.integers(start, len(tokens)))


@given(_edited())
def test_pieces_hold_the_tokens_of_edits(case: tuple[PieceTable, list[Token]]) -> None:
    """Any number of removals and insertions keep the order and origins of the tokens."""
    table, tokens = case
    assert _tokens(table) == tokens
    assert table.tokens_count == len(tokens)
    assert table.blocks == [piece.block for piece in table]


@given(_edited(), st.data())
def test_slice_equals_slice_of_token_list(
    case: tuple[PieceTable, list[Token]], data: st.DataObject
) -> None:
    """The slice begins at position 0."""
    table, tokens = case
    start, end = _range(data.draw, tokens)
    assert _tokens(table.slice(start, end)) == tokens[start:end]


@given(_edited(), _SIZES)
def test_appended_blocks_keep_their_computed_positions(
    case: tuple[PieceTable, list[Token]], sizes: list[int]
) -> None:
    """A turn's blocks behind an edited cache stay at their computed positions."""
    table, tokens = case
    behind, new = _computed(sizes, 1_000, len(tokens))
    assert _tokens(table.append(behind.blocks)) == tokens + new


@given(_edited(), st.data())
def test_unedited_prefix_is_whole_blocks_in_place(
    case: tuple[PieceTable, list[Token]], data: st.DataObject
) -> None:
    """The prefix ends at the requested length or before the first other piece."""
    table, tokens = case
    most = data.draw(st.integers(0, len(tokens) + 1))
    found = table.unedited(most)
    assert list(found) == list(table)[: len(found)]
    assert found.tokens_count <= most
    assert not found.is_edited
    assert [place for _, _, place in _tokens(found)] == list(range(found.tokens_count))
    if len(found) < len(table):
        following = table[len(found)]
        assert not following.is_whole or found.tokens_count + following.tokens_count > most
    assert table.is_edited == (len(table.unedited(len(tokens))) < len(table))


@given(_edited(), st.sets(st.integers(0, 10)))
def test_tokens_before_an_unusable_block_are_counted(
    case: tuple[PieceTable, list[Token]], numbers: set[int]
) -> None:
    """Count every token before the first token of an unusable block."""
    table, tokens = case
    lost = {ref for ref, *_ in tokens if int.from_bytes(ref.block_hash) in numbers}
    first = next((at for at, (ref, *_) in enumerate(tokens) if ref in lost), len(tokens))
    assert table.tokens_before(lost) == first


def test_tables_share_a_common_prefix() -> None:
    """Prefixes are common if pieces have the same parts of the same blocks with equal shifts."""
    table, _ = _computed([4, 4, 4])
    other = _splice(table, 9, 10, PieceTable())
    assert table.tokens_in_common(other) == other.tokens_in_common(table) == 8
    assert table.tokens_in_common(table) == 12
    assert table.tokens_in_common(PieceTable()) == 0


_BLOCK = _ref(1, 4)


@pytest.mark.parametrize(
    "items",
    [
        [Piece(_BLOCK, 0, 5)],
        [Piece(_BLOCK, 2, 2)],
        [Piece(_BLOCK, 3, 2)],
        [Piece(_BLOCK, -1, 2)],
        [Piece(_BLOCK, 1, 4)],  # the block's first token would be at position -1
        [Piece(_BLOCK, 0, 4, 1)],
        [Piece(_BLOCK, 0, 4, -AGENT_TOKENS_MAX)],
        [Piece(_BLOCK, 0, 1, at) for at in range(PIECES_MAX + 1)],
    ],
)
def test_invalid_piece_table_is_rejected(items: list[Piece]) -> None:
    """Pieces are outside of a block, before or behind all tokens, or too many."""
    with pytest.raises(CorruptDataError):
        PieceTable(tuple(items))


@pytest.mark.parametrize("position", [-1, 4])
def test_position_out_of_range_is_rejected(position: int) -> None:
    """Negative positions are not counted from the end."""
    with pytest.raises(AssertionError):
        PieceTable().append([_BLOCK]).slice(position, 5)
