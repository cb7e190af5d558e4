"""What every part of a running node stands on: its facts, health, threads and turns."""
