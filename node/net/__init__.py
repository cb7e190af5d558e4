"""Links and connections to other nodes: found, proven, measured."""
