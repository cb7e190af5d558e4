"""The engine's thread: who runs next, in which memory, one step after another."""
