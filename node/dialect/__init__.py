"""Formats in which model families write thoughts and tool calls, to read and to enforce."""
