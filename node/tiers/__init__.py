"""What is in memory and on disk, and who gives way: saves, restores, evictions, erasures."""
