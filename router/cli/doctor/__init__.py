"""`macfabric doctor` and `config check`: is this machine fit for a fabric."""
