"""Turn that the current task works for, and its span in a trace.

Log lines carry the turn's id. A task passes both on to the tasks that it creates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fabric.control.calls import CallOrigin
from fabric.ids import Traceparent, TurnId

_TURN: ContextVar[TurnId | None] = ContextVar("turn", default=None)
_TRACE: ContextVar[Traceparent | None] = ContextVar("trace", default=None)


def current_turn() -> TurnId | None:
    """Return the id of the turn that this task works for, or None."""
    return _TURN.get()


def current_trace() -> Traceparent | None:
    """Return the span that this task works in, or None."""
    return _TRACE.get()


def call_origin(term: int | None = None) -> CallOrigin:
    """Return the origin of a call that this task makes."""
    return CallOrigin(term, _TURN.get(), _TRACE.get())


def begin_turn(turn: TurnId | None) -> None:
    """Name the turn of this task, and of the tasks that it creates."""
    _TURN.set(turn)


@contextmanager
def about_turn(turn: TurnId | None) -> Iterator[None]:
    """Name the turn that a block of code works for."""
    before = _TURN.set(turn)
    try:
        yield
    finally:
        _TURN.reset(before)


@contextmanager
def about_trace(trace: Traceparent | None) -> Iterator[None]:
    """Name the span that a block of code works in."""
    before = _TRACE.set(trace)
    try:
        yield
    finally:
        _TRACE.reset(before)
