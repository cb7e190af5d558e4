"""Base of every part of a running node: its identity, health, threads and turns."""
