"""The pure core of macfabric: what node and router exchange, and the node's arithmetic.

No I/O, clock, randomness, threads, MLX or Ray. The one exception is the room `hosting`, which holds
what both processes need to run. Node alone uses kvcache but for its hashes, retention but for the
disk reserve, of record how caches are laid out, cut and rekeyed, of turn plans, edits and
alignments, and of net handshakes, tickets and compression.

`DISTRIBUTION` names the installed package that must own the import names `fabric`, `node` and
`router`; unrelated packages of the same names exist.
"""

DISTRIBUTION = "macfabric"

__version__ = "0.1.0"

# Sent in every hello; peers with another number refuse each other.
PROTOCOL_VERSION = 4

# Of control calls, their replies, and turns: what this code speaks, and the oldest that it serves
# with. A node reports both in its heartbeat, and a router that neither fits refuses the node. New
# fields of replies raise nothing, as they are skipped; a router sends new calls, and new fields of
# calls, only to nodes that report the version which brought them.
# 2: calls and turns name the turn and the span that they are made for.
CONTROL_VERSION = 2
CONTROL_VERSION_MIN = 1
