"""Scenarios: agents that meet in phases, declared in YAML; what each hears, and who speaks next."""
