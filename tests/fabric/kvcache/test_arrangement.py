"""Arrangements after edits, compared with a list of tokens with their origins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.kvcache.arrangement import Arrangement, Move, Shift

TOKENS = 12


@st.composite
def _edits(draw: st.DrawFn) -> list[list[Move]]:
    """Draw edits of a cache, each of which moves some runs of tokens to new positions."""
    cells, edits = list(range(TOKENS)), []
    for _ in range(draw(st.integers(1, 4))):
        moves, at, free = [], 0, 0
        while at < len(cells):
            if cells[at] < 0:
                at += 1
                continue
            most = next((i for i in range(at, len(cells)) if cells[i] < 0), len(cells))
            end = most - draw(st.integers(0, most - at))
            new_start = free + (draw(st.integers(0, 2)) if moves else 0)
            if not moves and at:
                moves.append(Move(0, 0, 0))
            moves.append(Move(at, end, new_start))
            free = moves[-1].new_end
            at = max(end + draw(st.integers(0, 2)), at + 1)
        edits.append(moves or [Move(0, 0, 0)])
        cells = _moved(cells, edits[-1])
    return edits


def _moved(cells: list[int], moves: list[Move]) -> list[int]:
    """Move a list's cells; -1 is a hole."""
    out = [-1] * moves[-1].new_end
    for move in moves:
        out[move.new_start : move.new_end] = cells[move.start : move.end]
    return out


def _cells(arrangement: Arrangement) -> list[int]:
    out = [-1] * arrangement.end
    for start, end in [(0, arrangement.tokens_count), *arrangement.ahead]:
        out[start:end] = range(start, end)
    for shift in arrangement.shifts:
        for at in range(shift.start, shift.end):
            out[at] -= shift.delta
    return out


@given(_edits())
def test_arrangement_after_edits_matches_token_list(edits: list[list[Move]]) -> None:
    found, cells = Arrangement(TOKENS, (), ()), list(range(TOKENS))
    for moves in edits:
        found, cells = found.after(moves), _moved(cells, moves)
        while cells and cells[-1] < 0:
            cells.pop()

    assert _cells(found) == cells
    assert found.tokens_count == (cells.index(-1) if -1 in cells else len(cells))
    assert found == Arrangement.of([(0, found.tokens_count), *found.ahead], found.shifts)


def test_inverse_moves_restore_the_arrangement() -> None:
    before = Arrangement(20, (), (Shift(3, 8, 5), Shift(8, 12, -2)))
    out = before.after([Move(0, 4, 0), Move(4, 20, 30)])
    back = out.after([Move(0, 4, 0), Move(30, 46, 4)])

    assert out.shifts == (Shift(3, 4, 5), Shift(30, 34, 31), Shift(34, 38, 24), Shift(38, 46, 26))
    assert (out.tokens_count, out.ahead) == (4, ((30, 46),))
    assert back == before


@pytest.mark.parametrize(
    "moves",
    [
        [Move(0, 4, 0), Move(3, 8, 6)],  # one token twice
        [Move(0, 4, 0), Move(6, 8, 3)],  # two tokens in one place
        [Move(0, 4, 0), Move(8, 10, 4), Move(6, 8, 6)],  # in another order
        [Move(0, 4, 0), Move(8, 16, 6)],  # over a hole
        [Move(0, 4, 0), Move(18, 22, 6)],  # past the end
    ],
    ids=str,
)
def test_invalid_moves_are_rejected(moves: list[Move]) -> None:
    with pytest.raises(AssertionError):
        Arrangement(10, ((14, 20),), ()).after(moves)


def test_shifts_must_cover_valid_tokens() -> None:
    with pytest.raises(AssertionError, match="valid tokens"):
        Arrangement.of([(0, 10), (14, 20)], [Shift(9, 12, 1)])
