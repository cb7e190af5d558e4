"""Scenarios that the router itself performs: runs, their journals and events, and the routes."""
