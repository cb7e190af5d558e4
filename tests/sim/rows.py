"""What is known of all caches' entries: whose they are, of which tokens, and when they grew."""

from typing import ClassVar

import numpy as np

ENTRY_BYTES = 8


class Rows:
    """What is known of every entry that nodes computed: token, place and for which agents."""

    known: ClassVar[dict] = {}

    @classmethod
    def note(cls, entry, token, place, owner):
        before = cls.known.get(entry)
        if before is None:
            cls.known[entry] = (token, place, owner)
        elif owner not in before[2:]:  # several agents begin alike
            cls.known[entry] = (*before, owner)

    @classmethod
    def share(cls, entries, owner):
        """Note that an agent uses what was computed for its text, by whomever."""
        for at in range(0, len(entries), ENTRY_BYTES):
            entry = entries[at : at + ENTRY_BYTES]
            known = cls.known.get(entry)
            if known is not None and owner not in known[2:]:
                cls.known[entry] = (*known, owner)


class Growth:
    """How often a cache took more memory: between two of these none can be beyond a budget."""

    count = 0


def grown(array, size_bytes):
    """Return a flat array with room for so many bytes."""
    if size_bytes <= len(array):
        return array
    Growth.count += 1
    larger = np.zeros(size_bytes, np.uint8)
    larger[: len(array)] = array
    return larger
