"""Turns in the router: placement, admission, streaming and handover."""
