"""Spans of turns, moves and transfers, for a collector that speaks OpenTelemetry's protocol.

    turn ──▶ placement, queue, move ──▶ serve (on its node) ──▶ queue, prepare, load, prefill, …
                  └ offer_migration, copy_blocks, … on both nodes of the move ──▶ fetch

Off until `begin_tracing`; while off, a span costs one look-up of a variable. A span names its turn,
nodes and counts, and tenants and agents by their digests; it never has text of a prompt or a key.
The current span travels as W3C's `traceparent`, in a turn's request and with control calls.
`fabric/hosting/otel_spans.py` is the one module that imports OpenTelemetry.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from fabric.errors import FabricError, FatalError
from fabric.hosting.otel_spans import Attribute, open_tracer
from fabric.hosting.turn_context import about_trace, current_trace, current_turn
from fabric.ids import Traceparent
from fabric.settings import TracingSettings

_log = logging.getLogger(__name__)


class Span(Protocol):
    """Span that one task uses."""

    @property
    def trace(self) -> Traceparent | None:
        """Name of the span, for its child spans."""
        ...

    def note(self, **attributes: Attribute) -> None:
        """Add attributes."""
        ...

    def part(self, name: str, begun_s: float, ended_s: float, **attributes: Attribute) -> None:
        """Add a part that is over, between two moments of the machine's monotonic clock."""
        ...

    def end(self, failure: str | None = None) -> None:
        """End the span now, with a failure's code if it failed; ending twice is no error."""
        ...


class Tracer(Protocol):
    """Source of the spans of one process."""

    def begin(
        self, name: str, parent: Traceparent | None, attributes: Mapping[str, Attribute]
    ) -> Span:
        """Begin a span, as a part of another one if that is named."""
        ...

    def close(self) -> None:
        """Send what is left within a bounded time."""
        ...


class _NoSpan:
    """Span that is not recorded; parts of it belong to the span around it."""

    def __init__(self, trace: Traceparent | None) -> None:
        self.trace = trace

    def note(self, **attributes: Attribute) -> None:
        """Drop attributes."""

    def part(self, name: str, begun_s: float, ended_s: float, **attributes: Attribute) -> None:
        """Drop a part."""

    def end(self, failure: str | None = None) -> None:
        """Do nothing."""


NO_SPAN: Final[Span] = _NoSpan(None)


class _Process:
    """Holder of the tracer of this process."""

    tracer: Tracer | None = None


def begin_tracing(settings: TracingSettings, process: str) -> None:
    """Send spans of this process from now on, if the settings name a collector.

    Raise FatalError if the packages for it are not installed.
    """
    if not settings.endpoint:
        return
    try:
        tracer = open_tracer(settings, process)
    except ImportError as error:
        message = (
            "tracing.endpoint is set, and OpenTelemetry is not installed on this machine: "
            f"pip install 'macfabric[otel]' ({error.name} is missing)"
        )
        raise FatalError(message) from None
    end_tracing()
    _Process.tracer = tracer
    _log.info("spans are sent to %s", settings.endpoint)


def end_tracing() -> None:
    """Send the remaining spans, and stop tracing."""
    tracer, _Process.tracer = _Process.tracer, None
    if tracer is not None:
        tracer.close()


def is_tracing() -> bool:
    """Return whether this process sends spans."""
    return _Process.tracer is not None


def begin_span(name: str, **attributes: Attribute) -> Span:
    """Begin a span as a part of this task's; the caller ends it."""
    tracer = _Process.tracer
    if tracer is None:
        return NO_SPAN
    return tracer.begin(name, current_trace(), {"turn": current_turn(), **attributes})


@contextmanager
def span(name: str, **attributes: Attribute) -> Iterator[Span]:
    """Trace a block of code; an error ends the span with its code, never with its text."""
    if _Process.tracer is None:
        yield NO_SPAN
        return
    begun = begin_span(name, **attributes)
    try:
        with about_trace(begun.trace):
            yield begun
    except BaseException as error:
        begun.end(failure_of(error))
        raise
    else:
        begun.end()


def failure_of(error: BaseException) -> str:
    """Return the code of an error for its span."""
    return error.code if isinstance(error, FabricError) else type(error).__name__
