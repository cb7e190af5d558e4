"""The nodes: who is there, who holds what, and how they are called."""
