"""What the fabric's own API shows, as JSON: one function per thing, for routes and for events."""
