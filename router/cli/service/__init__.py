"""`macfabric service`: units with which launchd or systemd runs a part of a fabric."""
