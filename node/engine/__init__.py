"""The engine's thread: the next sequence, its memory, one step after another."""
