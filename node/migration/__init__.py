"""Agents that leave or arrive: moves, copies, hibernation files."""
