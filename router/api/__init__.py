"""The seam between dialects and turns: what an adapter does, and one route for all of them."""
