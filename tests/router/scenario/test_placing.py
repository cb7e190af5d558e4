"""Moves of agents by their place hints."""

import pytest

from router.scenario.run import choose_node
from router.scenario.scenario import PlaceHint

NODES = ("a", "b", "c")
APART, NEAR = PlaceHint(apart_from=("other",)), PlaceHint(together_with=("other",))


@pytest.mark.parametrize(
    ("place", "current", "others", "chosen"),
    [
        (APART, "b", ["c"], None),  # apart already
        (APART, "b", ["b"], "a"),
        (APART, "a", ["a", "b"], "c"),
        (APART, "a", ["a", "b", "c"], None),  # all nodes are taken
        (APART, None, ["a"], "b"),
        (APART, "a", [], None),  # the other has no node yet
        (NEAR, "a", ["b"], "b"),
        (NEAR, "b", ["a", "b"], None),
        (NEAR, "a", [], None),
        (NEAR, "a", ["gone"], None),
        (PlaceHint(node="c"), "a", [], "c"),
        (PlaceHint(node="c"), "c", [], None),
        (PlaceHint(node="z"), "a", [], None),
    ],
)
def test_place_hint_chooses_node(place, current, others, chosen):
    assert choose_node(place, NODES, current, others) == chosen
