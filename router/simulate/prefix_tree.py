"""Prefixes that a node has published, as a radix tree that counts the agents of each branch."""

from collections.abc import Sequence

from fabric.turn.sketch import common_pieces


class _Branch:
    __slots__ = ("children", "edge", "uses")

    def __init__(self, edge: Sequence[int], uses: int) -> None:
        self.edge = edge
        self.uses = uses
        self.children: dict[int, _Branch] = {}


class PrefixTree:
    """Published chains of pieces; what several agents share is there until the last one goes."""

    def __init__(self) -> None:
        self._root = _Branch((), 0)

    def add(self, pieces: Sequence[int]) -> int:
        """Publish a chain; return how many leading pieces were published already."""
        branch, depth, known = self._root, 0, 0
        while depth < len(pieces):
            child = branch.children.get(pieces[depth])
            if child is None:
                branch.children[pieces[depth]] = _Branch(pieces[depth:], 1)
                return known
            common = common_pieces(child.edge, pieces[depth:])
            if common < len(child.edge):
                _split(child, common)
            child.uses += 1
            branch, depth = child, depth + common
            known = depth
        return known

    def remove(self, pieces: Sequence[int]) -> None:
        """Withdraw a chain that was published."""
        branch, depth = self._root, 0
        while depth < len(pieces):
            child = branch.children[pieces[depth]]
            child.uses -= 1
            if not child.uses:
                del branch.children[pieces[depth]]
                return
            branch, depth = child, depth + len(child.edge)

    def longest(self, pieces: Sequence[int]) -> int:
        """Return how many leading pieces are published."""
        branch, depth = self._root, 0
        while depth < len(pieces):
            child = branch.children.get(pieces[depth])
            if child is None:
                return depth
            common = common_pieces(child.edge, pieces[depth:])
            depth += common
            if common < len(child.edge):
                return depth
            branch = child
        return depth


def _split(branch: _Branch, at: int) -> None:
    """Cut a branch's edge after `at` pieces; its rest becomes its only child."""
    rest = _Branch(branch.edge[at:], branch.uses)
    rest.children = branch.children
    branch.edge, branch.children = branch.edge[:at], {rest.edge[0]: rest}
