"""Control calls that a client's next token waits for: they travel as the tokens do, over HTTP.

A call of a Ray actor and its answer take 3.7 ms where a request over HTTP takes 1.8 (two shared
cores, 35 kB), and a move makes two of them while its agent is silent. Each may arrive twice, even
while the first is still being carried out, and is answered alike.
"""

from typing import Final

from fabric.control.node_calls import CommitMigration, SealAgent

HASTY: Final = (SealAgent, CommitMigration)
HASTY_PATH: Final = "/internal/control"
NODE_HEADER: Final = "x-macfabric-node"  # whom the call is meant for: an address may change hands
