"""The pure core of macfabric: what node and router exchange, and the node's arithmetic.

No I/O, clock, randomness, threads, MLX or Ray. The one exception is `hosting`, which holds
what both processes need to run. Only the node uses kvcache (except its hashes), retention (except
the disk reserve), layouts, cuts and rekeying of record, plans, edits and alignments of turn, and
handshakes, tickets and compression of net.

`DISTRIBUTION` names the installed package that must own the import names `fabric`, `node` and
`router`; unrelated packages of the same names exist.
"""

DISTRIBUTION = "macfabric"

__version__ = "0.1.0"

# Sent in every hello; peers with another number refuse each other.
PROTOCOL_VERSION = 4

# Versions of control calls, their replies and turns: the current one, and the oldest supported one.
# A node reports both in its heartbeat, and a router that supports neither refuses the node. New
# fields of replies need no new version, since receivers skip them; a router sends new calls, and
# new fields of calls, only to nodes that report the version which introduced them. 2: calls and
# turns carry the ids of their turn and span.
CONTROL_VERSION = 2
CONTROL_VERSION_MIN = 1
