"""The two ends of `bench transfer`, each in its own process: JSON lines in, JSON lines out.

`python -m benchmarks.transfer_ends send FOLDER BLOCKS` stores blocks as a node does and serves
them; `... receive` fetches them into memory as a node does, once for each order line.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fabric.control.agent_at import OfferRequest
from fabric.hosting.clock import SystemClock
from fabric.ids import (
    AgentId,
    Fingerprint,
    MigrationId,
    NodeName,
    TenantId,
    parse_block_hash,
    parse_checksum,
)
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import BLOCK_TOKENS
from fabric.net.links import Address, LinkKind
from fabric.settings import AUTO
from node.limits import TRANSFER_STREAMS
from node.net.connections import Connections
from node.net.listeners import EVERYWHERE
from node.transfer.client import fetch_blocks
from node.transfer.server import TransferServer

KEY = bytes(range(32))
FINGERPRINT = Fingerprint(b"r" * 32)
SENDER, RECEIVER = NodeName("sender"), NodeName("receiver")
OFFER_S = 3_600.0


def send(folder: Path, blocks_count: int) -> None:
    """Store blocks of a real model's geometry, offer them, and answer with counts."""
    from benchmarks.memory import GEOMETRIES, half_precision_spec
    from benchmarks.restore import MODEL, write_library

    spec = half_precision_spec(GEOMETRIES[MODEL])
    library = write_library(folder, spec, blocks_count * BLOCK_TOKENS)
    blocks, refs = library.store.blocks, library.layout.blocks
    server = TransferServer(SENDER, KEY, FINGERPRINT, blocks, SystemClock(), host=EVERYWHERE)
    request = OfferRequest(
        TenantId("bench"), AgentId("bench"), 1, MigrationId("bench"), target=RECEIVER
    )
    ticket = server.offers.add(request, refs, OFFER_S)
    named = [[r.block_hash.hex(), r.checksum.hex(), r.tokens_count, r.payload_bytes] for r in refs]
    _say({"port": server.addresses()[0].port, "ticket": ticket.hex(), "refs": named})
    for _ in _lines():
        _say(server.counts())
    server.stop()


def receive() -> None:
    """Fetch the blocks that the first line describes, as each further line orders."""
    lines = _lines()
    offer = next(lines)
    refs = [
        BlockRef(
            parse_block_hash(bytes.fromhex(block_hash)),
            parse_checksum(bytes.fromhex(checksum)),
            tokens,
            payload_bytes,
        )
        for block_hash, checksum, tokens, payload_bytes in offer["refs"]
    ]
    # In memory already, as a node's resident buffers are when a transfer begins.
    places = {ref.name: np.zeros(ref.payload_bytes, np.uint8) for ref in refs}
    ticket, connections = bytes.fromhex(offer["ticket"]), Connections()
    for order in lines:
        _say(_fetch(order, offer["port"], ticket, refs, places, connections))
    connections.close()


def _fetch(
    order: Mapping[str, Any],
    port: int,
    ticket: bytes,
    refs: list[BlockRef],
    places: Mapping[str, np.ndarray[Any, Any]],
    connections: Connections,
) -> dict[str, Any]:
    tell_at, done_count = int(order.get("tell_at", 0)), 0

    def done(_: BlockRef, __: memoryview) -> None:
        nonlocal done_count
        done_count += 1
        if done_count == tell_at:
            _say({"done": done_count})

    kept = Connections() if order.get("cold") else connections
    began_s = time.perf_counter()
    report = fetch_blocks(
        [Address(host, port, LinkKind(kind), mbit) for host, kind, mbit in order["links"]],
        name=RECEIVER,
        source=SENDER,
        cluster_key=KEY,
        fingerprint=FINGERPRINT,
        ticket=ticket,
        refs=refs[: order["blocks"]],
        allocate=lambda ref: places[ref.name].data,
        done=done,
        streams=order.get("streams", TRANSFER_STREAMS),
        connections=kept,
        encrypt_links=order.get("encrypt_links", AUTO),
    )
    seconds = time.perf_counter() - began_s
    if kept is not connections:
        kept.close()
    return {
        "seconds": seconds,
        "bytes": report.bytes,
        "wire_bytes": report.wire_bytes,
        "links": [use.wire_bytes for use in report.links],
        "counts": kept.counts(),
    }


def _lines() -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in sys.stdin)


def _say(what: Mapping[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """Run the end that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    ends = parser.add_subparsers(dest="end", required=True)
    sender = ends.add_parser("send")
    sender.add_argument("folder", type=Path)
    sender.add_argument("blocks", type=int)
    ends.add_parser("receive")
    arguments = parser.parse_args()
    if arguments.end == "send":
        send(arguments.folder, arguments.blocks)
    else:
        receive()


if __name__ == "__main__":
    main()
