"""The commands that perform scenarios."""
