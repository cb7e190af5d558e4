"""Nodes of a fabric: membership, directory of agents, and control calls."""
