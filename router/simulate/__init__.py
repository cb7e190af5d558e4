"""Simulator of fleets: the shipped placement, index, ledger and directory over modelled nodes."""
