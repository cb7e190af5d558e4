"""Trials of a model's caches at start, so that nothing is assumed."""
