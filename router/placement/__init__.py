"""Placement of turns and agents by cost in seconds; pure but for its inputs."""
