"""Blocks, records and tombstones on this Mac's disk."""
