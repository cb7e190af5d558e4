"""Moves, copies, drains, erasures and recoveries of agents."""
