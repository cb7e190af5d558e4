"""Retention: probability of reuse, and choice of victims."""
