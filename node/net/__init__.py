"""Links and connections to other nodes: discovery, authentication, measurement."""
