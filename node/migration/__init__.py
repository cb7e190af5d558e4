"""Agents that leave and come: moves, copies, hibernation files."""
