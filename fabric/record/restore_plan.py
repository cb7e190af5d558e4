"""Largest part of a stored layout that a cache can be restored to.

full layers        need every block that is kept
window layers      need the window before each token that is computed next: at the end, and
                   before each hole
recurrent layers   need a state of exactly the last token

Rows of windows that are not stored come back only by computing all tokens before them, so what is
kept after such a place becomes a hole, too.
"""

from dataclasses import replace

from fabric.kvcache.arrangement import Range
from fabric.record.layout import Held, Layout
from fabric.record.manifest import Manifest


def restorable(layout: Layout, window_tokens: int, *, has_states: bool = False) -> Layout:
    """Return as much of the layout as its stored windows and states allow to restore."""
    if not window_tokens and not has_states:
        return layout
    lacking = [
        (start, end)
        for start, end, part in layout.placed()
        if isinstance(part, Held) and part.window is None
    ]
    layout = _beginning(layout, window_tokens, lacking, has_states=has_states)
    for start, end in layout.arrangement.ahead:
        if _is_window_lacking(lacking, max(start, end - window_tokens + 1), end):
            layout = layout.without(start, end)
    return layout.without_open_end()


def _beginning(
    layout: Layout, window_tokens: int, lacking: list[Range], *, has_states: bool
) -> Layout:
    """Return the layout, or its beginning up to where windows and a state are stored."""
    count = layout.arrangement.tokens_count
    if has_states:
        points = [state.end for state in reversed(layout.states) if state.end <= count]
    else:
        ends = [end for _, end, _ in layout.placed() if end < count]
        points = [count, *reversed(ends)]
    for point in points:
        first = max(0, point - window_tokens + 1)
        if not window_tokens or not _is_window_lacking(lacking, first, point):
            return layout if point == count else layout.cut(point)
    return layout.cut(0)


def _is_window_lacking(lacking: list[Range], start: int, end: int) -> bool:
    return any(first < end and start < last for first, last in lacking)


def essential(record: Manifest, window_tokens: int) -> Manifest:
    """Return the record without windows and states that its last token does not need."""
    first = max(0, record.tokens_count - window_tokens + 1)
    return replace(
        record,
        windows=tuple(place for place in record.windows if place.end > first),
        states=record.states[-1:],
    )
