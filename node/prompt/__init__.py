"""A request's prompt: restored, directed, rendered, encoded; no lock, engine or disk."""
