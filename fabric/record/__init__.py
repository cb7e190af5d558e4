"""Durable records: an agent's manifest, tombstones, hibernation files, and how they are cut."""
