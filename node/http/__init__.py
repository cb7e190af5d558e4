"""The node's HTTP routes: turns, two control calls, hibernation files."""
