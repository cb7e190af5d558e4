"""Bounds on HTTP connections, of the router and of a node: name, unit last, and the reason."""

from typing import Final

from fabric.limits import KIB, MIB

HEAD_BYTES_MAX: Final = 64 * KIB  # a request's headers; a hibernation's call takes 8 KiB of them
HEADERS_MAX: Final = 100
URL_BYTES_MAX: Final = 16 * KIB
HEADS_BYTES_MAX: Final = 8 * MIB  # of all incomplete heads together
HEAD_S: Final = 10.0  # from a connection's begin, or a request's, to the end of its headers
LINGER_S: Final = 10.0  # for reading a refusal, and for the first bytes of a body it discards
WRITE_STALL_S: Final = 60.0  # without one byte read by the client of an answer
PIPELINED_MAX: Final = 16  # requests that wait behind another one of their connection
RECEIVE_BYTES_MAX: Final = 64 * KIB  # from one socket at a time
STRANGERS_MAX: Final = 1_024  # connections that have shown no key yet
STRANGER_S: Final = 2.0  # before it makes room for others: a busy client connects first, then sends
ACCEPTS_MAX: Final = 64  # connections taken in before anything is read again
STRANGERS_PER_SOURCE_MAX: Final = 512  # one proxy's clients may all come at once
TURNS_UNANSWERED_MAX: Final = 320  # by one node, more than wait there; others wait in the router
HANDSHAKES_PER_NODE_MAX: Final = 16  # that the router begins at once; more would all time out
CONNECTIONS_MAX: Final = 4_096  # those that have; idle ones make room
STOP_WAIT_S_MAX: Final = 3_600.0  # that a stop waits for running turns, whatever is asked for
STOPPING_RETRY_S: Final = 5.0  # before a client of a router that stops asks again
KEEP_ALIVE_S: Final = 75  # without a request, after which a server closes a connection
KEPT_IDLE_S: Final = 60.0  # and the router one of its own to a node: before that node does
KEPT_LIFE_S: Final = 600.0  # of one of those; then certificates are looked at again
PREFLIGHT_KEPT_S: Final = 600  # by a browser, before it asks again what a page may do
ALLOWED_HOSTS_MAX: Final = 64  # names in settings, and as many origins
