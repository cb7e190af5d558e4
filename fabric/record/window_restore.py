"""How much of a layout can be gone on with, given which blocks of window layers are stored.

Full layers need every row that is kept; window layers those in front of each place at which
something is computed. Where nobody has them, no computing brings them back but that of all tokens
before: what is kept behind such a place is then a hole, too.
"""

from fabric.record.layout import Held, Layout


def with_windows(layout: Layout, window_tokens: int) -> Layout:
    """Return the layout with as much of it kept as its stored windows allow."""
    if not window_tokens:
        return layout
    layout = _beginning(layout, window_tokens)
    for start, end in layout.arrangement.ahead:
        if not _has_windows(layout, max(start, end - window_tokens + 1), end):
            layout = layout.without(start, end)
    return layout.without_open_end()


def _beginning(layout: Layout, window_tokens: int) -> Layout:
    """Return it as it is, or what of its beginning serves: then all that is behind is computed."""
    count = layout.arrangement.tokens_count
    while count and not _has_windows(layout, max(0, count - window_tokens + 1), count):
        ends = (end for _, end, _ in layout.placed() if end < count)
        count = max(ends, default=0)
        layout = layout.cut(count)
    return layout


def _has_windows(layout: Layout, start: int, end: int) -> bool:
    """Say whether window layers' rows of the kept tokens `start:end` are stored."""
    return all(
        part.window is not None
        for part_start, part_end, part in layout.placed()
        if isinstance(part, Held) and part_start < end and part_end > start
    )
