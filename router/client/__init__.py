"""A small client of a fabric's own API, with the standard library alone."""
