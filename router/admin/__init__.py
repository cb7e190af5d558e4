"""The fabric's own API: agents, copies, nodes, health, metrics."""
