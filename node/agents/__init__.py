"""The agents of one node: their table, index and use."""
