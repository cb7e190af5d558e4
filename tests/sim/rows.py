"""Provenance of all cache rows: their tokens, places, agents and origins."""

from typing import ClassVar

import numpy as np

ENTRY_BYTES, STATE_BYTES = 8, 16


class Rows:
    """The token, place and agents of every entry that nodes computed."""

    known: ClassVar[dict] = {}
    words: ClassVar[dict] = {}  # by entry, or state: the markers of talks that were read before it
    origins: ClassVar[dict] = {}  # by entry: the agents that it derives from, each with its series
    settled: ClassVar[set] = set()  # entries whose origins include those of the rows before them
    origin: ClassVar = None  # returns an agent with its series

    @classmethod
    def forget_all(cls, origin):
        """Drop all rows before another run."""
        cls.known, cls.words, cls.origins, cls.settled = {}, {}, {}, set()
        cls.origin = origin

    @classmethod
    def note(cls, entry, token, place, owner):
        before = cls.known.get(entry)
        if before is None:
            cls.known[entry] = (token, place, owner)
        elif owner not in before[2:]:  # several agents have the same prefix
            cls.known[entry] = (*before, owner)

    @classmethod
    def trace(cls, entry, words, borrowed_origins, owner):
        """Record the inputs of an entry; if it was computed before, keep the common ones."""
        origins = borrowed_origins | {cls.origin(owner)}
        cls.note_settings(entry, words)
        cls.origins[entry] = origins & cls.origins.get(entry, origins)

    @classmethod
    def note_settings(cls, entry, words):
        """Record the markers that an entry or a state was computed with."""
        cls.words[entry] = words & cls.words.get(entry, words)

    @classmethod
    def word_at(cls, entries):
        """Return the marker that some entries end with; None where they end with none."""
        known = [cls.known.get(entry) for entry in entries]
        text = "".join(chr(row[0]) if row is not None else " " for row in known)
        start = text.rfind("<")
        is_marker = start >= 0 and text[start + 1 : -1].replace(".", "").isdigit()
        return text[start:] if is_marker else None

    @classmethod
    def share(cls, entries, owner):
        """Record that an agent uses entries computed for its text by other agents."""
        for at in range(0, len(entries), ENTRY_BYTES):
            entry = entries[at : at + ENTRY_BYTES]
            known = cls.known.get(entry)
            if known is not None and owner not in known[2:]:
                cls.known[entry] = (*known, owner)


class Growth:
    """Counter of cache growths, the only moments at which a budget can be exceeded."""

    count = 0


def grown(array, size_bytes):
    """Return a flat array with room for so many bytes."""
    if size_bytes <= len(array):
        return array
    Growth.count += 1
    larger = np.zeros(size_bytes, np.uint8)
    larger[: len(array)] = array
    return larger
