"""The dashboard: a page at `/` that shows the fabric by the router's public API."""
