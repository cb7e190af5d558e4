"""Shifts: rows of a cache that were moved from where they were computed.

    computed   0 ....... 300 ....... 700 ...... 1000
    edited     0 ....... 300 ...... 600                 300:700 taken out: Shift(300, 600, -400)

An edit moves rows unchanged. A reader rotates them by `delta` (`Rotation`), so moving them back
and forth loses nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec


@dataclass(frozen=True, slots=True)
class Shift:
    """Tokens `start:end` of a cache moved by `delta` positions from where they were computed."""

    start: int
    end: int
    delta: int  # negative: before


def joined(shifts: Iterable[Shift]) -> tuple[Shift, ...]:
    """Leave out tokens in their own places, and join neighbours that are equally far from them."""
    merged: list[Shift] = []
    for shift in shifts:
        if shift.start == shift.end or not shift.delta:
            continue
        last = merged[-1] if merged else None
        if last is not None and (last.end, last.delta) == (shift.start, shift.delta):
            merged[-1] = Shift(last.start, shift.end, shift.delta)
        else:
            merged.append(shift)
    return tuple(merged)


def cut(shifts: tuple[Shift, ...], start: int, end: int) -> tuple[Shift, ...]:
    """Return what there is of them in `start:end`, counted from `start` on."""
    if not shifts or (start == 0 and shifts[-1].end <= end):  # most often
        return shifts
    return tuple(
        Shift(max(s.start, start) - start, min(s.end, end) - start, s.delta)
        for s in shifts
        if max(s.start, start) < min(s.end, end)
    )


def runs(shifts: Iterable[Shift], tokens_count: int) -> Iterator[Shift]:
    """Yield all of `tokens_count` tokens in order: shifts, and what is in place as delta 0."""
    at = 0
    for shift in shifts:
        if at < shift.start:
            yield Shift(at, shift.start, 0)
        yield shift
        at = shift.end
    if at < tokens_count:
        yield Shift(at, tokens_count, 0)


def why_unshiftable(spec: ModelCacheSpec) -> str:
    """Return why rows of such a cache must stay where they were computed; "" if they need not."""
    if not spec.layers:
        return "nothing is known of the model's caches"
    return next((why for why in map(_why_unshiftable, spec.layers) if why), "")


def _why_unshiftable(layer: LayerSpec) -> str:
    if layer.kind is LayerKind.RECURRENT:
        return "recurrent layers keep all tokens in one state, of which none can be taken out"
    if layer.is_chunked:
        return "layers of chunks see back to places that do not move"
    return layer.rotations_unknown
