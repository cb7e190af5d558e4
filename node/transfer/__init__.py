"""Transfer of blocks between nodes: offers, the server, and fetches over several links."""
