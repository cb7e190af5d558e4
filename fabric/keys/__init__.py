"""The names and forms of keys and secrets; files and sockets are elsewhere."""
