"""Incoming moves of a node so far."""


def pinned_blocks(node):
    """Return the blocks that are pinned for each move and not yet in a record."""
    return {move.name: list(move.refs) for move in node.moves.incoming if move.refs}
