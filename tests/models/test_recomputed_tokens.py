"""Choices of recomputed tokens use equal budgets and move nothing else."""

import numpy as np
import pytest

from benchmarks.recomputed_tokens import CHOICES, Deviations, choose_tokens, places, remaining_moves
from fabric.kvcache.arrangement import Move

MOVES = (Move(0, 10, 0), Move(20, 60, 15), Move(70, 150, 60))
FOUND = Deviations(np.arange(120.0), np.arange(120.0)[::-1])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
def test_only_chosen_tokens_are_recomputed(choice, share):
    picked = choose_tokens(choice, share, MOVES, FOUND)
    moves = remaining_moves(MOVES, picked)
    assert picked.sum() <= round(share * len(picked))
    assert choice == "blocks" or picked.sum() == round(share * len(picked))
    assert moves[0] == MOVES[0]
    assert {m.new_start - m.start for m in moves[1:]} <= {-5, -10}
    kept = places(moves) if len(moves) > 1 else []
    assert set(kept) == set(places(MOVES)[~picked])


def test_each_choice_selects_its_own_tokens():
    first = places(MOVES)[choose_tokens("first", 0.1, MOVES, FOUND)]
    assert list(first) == [*range(15, 21), *range(60, 66)]
    assert choose_tokens("deviating", 0.1, MOVES, FOUND)[-12:].all()
    assert choose_tokens("oracle", 0.1, MOVES, FOUND)[:12].all()
    assert choose_tokens("blocks", 0.2, MOVES, FOUND)[-8:].all()
