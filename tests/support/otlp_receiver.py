"""Collector of spans by OTLP over HTTP, in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class ReceivedSpan:
    """Span as a collector receives it."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    start_ns: int
    end_ns: int
    failed: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.id}-01"


@dataclass
class Collector:
    """Received spans; requests are answered once `may_answer` is set."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    may_answer: threading.Event = field(default_factory=threading.Event)
    spans: list[ReceivedSpan] = field(default_factory=list)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def parts_of(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        return [each for each in self.spans if each.parent == span.id]

    def take(self, body: bytes) -> None:
        """Store the spans of one request."""
        self.bodies.append(body)
        sent = ExportTraceServiceRequest.FromString(body)
        for resource in sent.resource_spans:
            self.resources.append(_values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += [_received(span) for span in scope.spans]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _received(span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


@contextmanager
def collector(*, answers: bool = True) -> Iterator[Collector]:
    """Run a collector for a block of code; without `answers`, it answers only at the end."""
    received = Collector()
    if answers:
        received.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.arrived.set()
            received.may_answer.wait()
            received.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield received
    finally:
        received.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()
