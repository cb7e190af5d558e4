"""Memory and disk tiers: saves, restores, evictions and erasures."""
