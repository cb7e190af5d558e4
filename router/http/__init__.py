"""Parts that every route shares: keys, bodies, errors, streams."""
