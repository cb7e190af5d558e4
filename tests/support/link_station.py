"""A node's data plane and links alone, driven by JSON lines, for emulated Macs.

`python tests/support/link_station.py NAME INCARNATION`; each order is answered by one line.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fabric.codec import from_plain, to_plain  # noqa: E402
from fabric.hosting.clock import SystemClock  # noqa: E402
from fabric.ids import NodeName  # noqa: E402
from fabric.net.links import Address, PeerList  # noqa: E402
from node.net.interfaces import MACHINE  # noqa: E402
from node.net.link_table import LinkTable  # noqa: E402
from node.net.listeners import EVERYWHERE  # noqa: E402
from node.net.probe import Caller  # noqa: E402
from node.net.prober import LinkProber  # noqa: E402
from tests.support.transfers import FINGERPRINT, KEY, Shelf, serve  # noqa: E402


def main(name):
    clock = SystemClock()
    server = serve(Shelf(Path()), clock, name=NodeName(name), host=EVERYWHERE)
    table = LinkTable(clock)
    caller = Caller(NodeName(name), KEY, FINGERPRINT)
    prober = LinkProber(table, caller.measure, clock, server.follow)

    def probe(order):
        address = from_plain(Address, order["address"])
        measured = caller.measure(order["peer"], address, order["bytes"])
        device = measured.interface.device if measured.interface else None
        return {"moved": measured.moved_bytes, "device": device, "problem": measured.problem}

    def refresh(_):
        server.follow(MACHINE.refresh())
        return to_plain(server.addresses())

    orders = {
        "start": lambda _: prober.start(),
        "refresh": refresh,
        "meet": lambda order: table.set_peers(from_plain(PeerList, order["call"]).peers),
        "views": lambda _: to_plain(table.views()),
        "probe": probe,
    }
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(orders[order["do"]](order)), flush=True)
    prober.stop()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
