"""Control calls between router and nodes, as messages."""
