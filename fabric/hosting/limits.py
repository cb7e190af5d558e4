"""Bounds on the HTTP connections of a server, and on log files: name, unit last, and the reason."""

from typing import Final

from fabric.limits import KIB, MIB

HEAD_BYTES_MAX: Final = 64 * KIB  # a request's headers; a hibernation's call takes 8 KiB of them
HEADERS_MAX: Final = 100
URL_BYTES_MAX: Final = 16 * KIB
HEADS_BYTES_MAX: Final = 8 * MIB  # of all incomplete heads together
HEAD_S: Final = 10.0  # from the start of a connection or request to the end of its headers
FIRST_REQUEST_S: Final = 1.0  # for a connection that a stopping server has just accepted
WRITE_STALL_S: Final = 60.0  # without the client reading one byte of an answer
PIPELINED_MAX: Final = 16  # requests queued behind another one of their connection
RECEIVE_BYTES_MAX: Final = 64 * KIB  # from one socket at a time
UNAUTHENTICATED_MAX: Final = 1_024  # connections that have shown no key yet
UNAUTHENTICATED_PER_SOURCE_MAX: Final = 512  # one proxy's clients may all connect at once
UNAUTHENTICATED_S: Final = 2.0  # before eviction: a busy client connects first, then sends
ADMITTED_MAX: Final = 4_096  # connections that have shown a key; idle ones are evicted
ACCEPTS_MAX: Final = 64  # connections accepted before anything is read again
KEEP_ALIVE_S: Final = 75  # without a request, after which a server closes a connection

# Log files of one process
LOG_FILE_BYTES_MAX: Final = 8 * MIB
LOG_FILES_MAX: Final = 5  # the newest one among them
LOG_FRAMES_MAX: Final = 12  # innermost frames of one exception
LOG_TAIL_BYTES: Final = 256 * KIB  # end of one file that is read

# Spans of one process
SPANS_QUEUED_MAX: Final = 4_096  # some hundred turns; more are lost while a collector is slow
SPAN_BATCH_MAX: Final = 512  # spans in one request to the collector
SPAN_SEND_INTERVAL_S: Final = 2.0  # between two requests, unless a batch is full
SPAN_EXPORT_S: Final = 5.0  # one request, including retries
SPAN_CLOSE_S: Final = 2.0  # for the remaining spans when a process stops
SPAN_TEXT_CHARS_MAX: Final = 256  # one attribute: codes and names are shorter

# Connections whose bytes are discarded after an early answer
LINGER_S: Final = 10.0  # for reading a refusal, and for the first bytes of a discarded body
LINGER_BYTES_PER_S_MIN: Final = 1 * MIB  # of one connection: each buys it one more second
LINGER_BYTES_MAX: Final = 128 * MIB  # of one connection
LINGERING_MAX: Final = 256  # connections at once
LINGERING_BYTES_PER_S_MAX: Final = 256 * MIB  # of all together; then they wait for the next second
