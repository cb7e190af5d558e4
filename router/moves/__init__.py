"""Moves, copies, drains, erasures, takeovers and recoveries of agents."""
