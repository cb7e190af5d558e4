"""Bounds on HTTP connections that router and nodes share; servers are passed in."""
