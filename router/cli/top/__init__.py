"""`macfabric top`: the fabric as it is now, in the terminal."""
