"""Counters of one node's transfers since its start, under a fixed list of names.

Both ends count by name, and a name may contain the other end's code. So a view, and a metric,
has only the names listed here: whatever else was counted is summed up as one.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from fabric.net.wire import REFUSAL_CODES

OTHER: Final = "other"
_REFUSED: Final = frozenset(f"refused_{code}" for code in REFUSAL_CODES)

SENDING: Final = _REFUSED | {
    "connections",
    "parts",
    "bytes",
    "slices_held_back",  # throttled by more urgent ones
    "broken",
    "refused_tampered",
}
FETCHING: Final = _REFUSED | {
    "dialled",
    "reused",
    "blocks",
    "bytes",  # as they arrived: fewer where compressed, more where repeated
    "resumed",  # blocks continued after a broken connection
    "failed_over",  # fetches that completed although a link broke
    "overtaken",  # connections whose work a much faster one took over
    "silent",
    "broken",
    "tampered",
    "corrupt",
}


def bounded(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Keep the counts of `names`, and all others under one name."""
    kept = {name: counts[name] for name in sorted(names) if name in counts}
    rest = sum(counts.values()) - sum(kept.values())
    return kept | ({OTHER: rest} if rest else {})
