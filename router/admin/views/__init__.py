"""JSON of the fabric's own API, for routes and events alike."""
