"""`macfabric demo`: agents that remember, on a fabric of three nodes."""
