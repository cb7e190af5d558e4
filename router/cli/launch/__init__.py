"""`macfabric launch`: agent programs, pointed at the fabric and started."""
