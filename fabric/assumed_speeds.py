"""Speeds to plan with while a node has not measured its own."""

from typing import Final

PREFILL_TOKENS_PER_S: Final = 300.0
DECODE_TOKENS_PER_S: Final = 30.0
DISK_BYTES_PER_S: Final = 2e9  # below what any Apple SSD reads
