"""Copies of the active router's own memory, which its standby keeps: stored responses and runs."""
