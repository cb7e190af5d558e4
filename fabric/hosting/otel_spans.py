"""Spans by OpenTelemetry's SDK, sent over OTLP and HTTP; the one module that imports it.

Ended spans wait in a bounded queue for a thread of the SDK, so a collector that is slow or gone
costs spans and nothing else.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from fabric import __version__
from fabric.hosting.limits import (
    SPAN_BATCH_MAX,
    SPAN_CLOSE_S,
    SPAN_EXPORT_S,
    SPAN_SEND_INTERVAL_S,
    SPAN_TEXT_CHARS_MAX,
    SPANS_QUEUED_MAX,
)
from fabric.ids import Traceparent
from fabric.settings import TracingSettings

Attribute: TypeAlias = str | int | float | bool | None  # None: not known, and not sent

_PATH: Final = "/v1/traces"
_SERVICE: Final = "macfabric"
_NS: Final = 1_000_000_000

_log = logging.getLogger(__name__)


def open_tracer(settings: TracingSettings, process: str) -> "OtelTracer":
    """Return a tracer that sends spans to the collector of the settings; raise ImportError."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    # It warns of each lost span; `_Reporting` logs once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    for name in ("opentelemetry.sdk._shared_internal", "opentelemetry.exporter.otlp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(settings.endpoint.rstrip("/") + _PATH, timeout=SPAN_EXPORT_S)
    sending = BatchSpanProcessor(
        _Reporting(exporter, settings.endpoint),  # type: ignore[arg-type]  # it looks like one
        max_queue_size=SPANS_QUEUED_MAX,
        schedule_delay_millis=SPAN_SEND_INTERVAL_S * 1000,
        max_export_batch_size=SPAN_BATCH_MAX,
        export_timeout_millis=SPAN_EXPORT_S * 1000,
    )
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create(
            {
                "service.name": _SERVICE,
                "service.version": __version__,
                "service.instance.id": process,
            }
        ),
        span_limits=SpanLimits(max_span_attribute_length=SPAN_TEXT_CHARS_MAX),
        shutdown_on_exit=False,  # a collector that is gone must not delay the exit
    )
    provider.add_span_processor(sending)
    return OtelTracer(provider.get_tracer(_SERVICE, __version__), sending)


class _Reporting:
    """Exporter that logs once when the collector stops accepting spans, and when it resumes."""

    def __init__(self, exporter: Any, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Any) -> Any:
        """Send spans; return the SDK's result."""
        result = self._exporter.export(spans)
        is_failing = result.name != "SUCCESS"
        if is_failing and not self._is_failing:
            _log.warning(
                "the collector at %s does not accept spans: they are dropped", self._endpoint
            )
        elif self._is_failing and not is_failing:
            _log.info("the collector at %s accepts spans again", self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        """End a request that is being repeated."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return whether nothing waits here: the queue is the processor's."""
        return bool(self._exporter.force_flush(timeout_millis))


class OtelTracer:
    """Tracer over the SDK's tracer."""

    def __init__(self, tracer: Any, sending: Any) -> None:
        self._tracer = tracer
        self._sending = sending

    def begin(
        self, name: str, parent: Traceparent | None, attributes: Mapping[str, Attribute]
    ) -> "_Span":
        """Begin a span now."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if parent is None else {"traceparent": parent}
        # A context of its own: spans of other programs in this process are no parents.
        from opentelemetry.context import Context

        context = TraceContextTextMapPropagator().extract(carrier, Context())
        span = self._tracer.start_span(name, context, attributes=_known_attributes(attributes))
        return _Span(self._tracer, span)

    def close(self) -> None:
        """Send what is left, as long as a stop may take."""
        closing = threading.Thread(target=self._sending.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(SPAN_CLOSE_S)


class _Span:
    """Span of the SDK."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer = tracer
        self._span = span
        started_ns = getattr(span, "start_time", 0)  # 0: it is not sampled
        self._offset_ns = started_ns - time.monotonic_ns()
        context = span.get_span_context()
        self.trace = Traceparent(
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        )

    def note(self, **attributes: Attribute) -> None:
        """Add attributes."""
        self._span.set_attributes(_known_attributes(attributes))

    def part(self, name: str, begun_s: float, ended_s: float, **attributes: Attribute) -> None:
        """Add a part that is over."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        if not self._span.is_recording():
            return
        context = set_span_in_context(self._span, Context())
        begun_ns, ended_ns = (self._offset_ns + round(at_s * _NS) for at_s in (begun_s, ended_s))
        part = self._tracer.start_span(
            name, context, attributes=_known_attributes(attributes), start_time=begun_ns
        )
        part.end(max(begun_ns, ended_ns))

    def end(self, failure: str | None = None) -> None:
        """End the span now."""
        from opentelemetry.trace import Status, StatusCode

        if not self._span.is_recording():
            return
        if failure is not None:
            self._span.set_attributes(_known_attributes({"failure": failure}))
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _known_attributes(attributes: Mapping[str, Attribute]) -> dict[str, str | int | float | bool]:
    """Return the attributes that are known, under this project's names."""
    return {f"macfabric.{name}": value for name, value in attributes.items() if value is not None}
