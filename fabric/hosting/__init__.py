"""Impure code that node and router processes share: HTTP serving, clocks, process limits, files.

No other room of fabric imports it.
"""
