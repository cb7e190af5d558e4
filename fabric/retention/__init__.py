"""What is worth keeping: how probable reuse is, and whom to evict."""
