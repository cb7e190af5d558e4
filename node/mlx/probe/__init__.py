"""Trials at start: what a model's caches do, so that nothing is assumed."""
