"""Interface between dialects and turns: adapters, and one route for all of them."""
