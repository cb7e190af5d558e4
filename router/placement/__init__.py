"""Where a turn or an agent goes, in seconds; pure but for its inputs."""
