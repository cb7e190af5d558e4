"""Incoming moves of a node so far."""


def pinned_blocks(node):
    """Return the blocks that are pinned for each move, and in no record yet."""
    return {move.name: list(move.refs) for move in node.moves.incoming if move.refs}
