"""Check and repair what a node has stored, while it does not run."""
