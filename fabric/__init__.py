"""What macfabric is made of besides processes: caches, manifests, hashes, and what nodes say.

Pure Python without I/O, clock, randomness, MLX or Ray: everything from the world comes in as an
argument. `DISTRIBUTION` names the installed package that must own the import names `fabric`,
`node` and `router`; unrelated packages of the same names exist.
"""

DISTRIBUTION = "macfabric"

__version__ = "0.1.0"

# Sent in every hello; peers with another number refuse each other.
PROTOCOL_VERSION = 3
