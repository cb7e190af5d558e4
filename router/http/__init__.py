"""What every route shares: keys, bodies, errors, streams."""
