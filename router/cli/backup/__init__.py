"""`macfabric backup` and `restore`: a fabric's keys and agents in one folder, and back."""
