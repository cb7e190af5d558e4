"""What is worth keeping: reuse odds, and whom to evict."""
