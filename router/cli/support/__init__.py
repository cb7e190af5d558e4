"""`macfabric support-bundle`: what a maintainer needs to know, without secrets and names."""
