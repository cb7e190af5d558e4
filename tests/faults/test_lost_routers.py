"""The active router is killed, frozen or cut off during streams: the standby serves.

Processes and nodes are real, and nodes refuse the old router. The simulation has these faults in
any order (`tests/sim/test_two_routers.py`).
"""

import os
import signal
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks import namespaces
from tests.support.standby_fabric import (
    ask,
    check_refused,
    seconds_until_served,
    shown,
    streams_through,
    two_routers,
    until_role,
)

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_standby_serves_and_every_node_refuses_the_old_router(
    tmp_path, number, record_property
):
    with two_routers(tmp_path) as (nodes, one, two):
        assert ask(two, "by way of the standby").status_code == 200
        old = shown(one)["term"]
        with streams_through(one):
            one.send(number)
            seconds = seconds_until_served(two)
            record_property("seconds until a new turn was served", seconds)
            print(f"new turns after {seconds:.2f} s")
            assert shown(two)["role"] == "active"
            assert shown(two)["term"] > old
            check_refused(nodes, old)
            if number is signal.SIGSTOP:
                one.send(signal.SIGCONT)
                check_follows(one, two)
            else:
                one.stop()


def check_follows(one, two):
    """Check that a router that returns becomes the standby, and forwards turns."""
    until_role(one, "standby")
    seconds_until_served(one)  # its clients retry until it has found the new router
    assert shown(two)["role"] == "active"


class FarMac:
    """Namespace with a cable to the fabric and one to the clients, which share this namespace.

    Unplugged at this side, a cable drops packets silently, as a failed switch does.
    """

    def __init__(self, number):
        self.namespace = f"mf{number}-{os.getpid()}-far"
        fabric, clients = list(namespaces.subnet(number).subnets(new_prefix=24))[:2]
        self.host, self.address = str(fabric[1]), str(fabric[2])
        self._cable = f"mf{number}-fabric"
        namespaces.run("ip", "netns", "add", self.namespace)
        for device, net in ((self._cable, fabric), (f"mf{number}-clients", clients)):
            namespaces.run(
                *("ip", "link", "add", device, "type", "veth"),
                *("peer", "name", f"{device}0", "netns", self.namespace),
            )
            namespaces.ip_batch([f"addr add {net[1]}/24 dev {device}", f"link set {device} up"])
            inside = [f"addr add {net[2]}/24 dev {device}0", f"link set {device}0 up"]
            namespaces.ip_batch(inside, self.namespace)
        inside = ["link set lo up", f"route add default via {self.host}"]
        namespaces.ip_batch(inside, self.namespace)
        self.client_address = str(clients[2])

    @property
    def prefix(self):
        return "ip", "netns", "exec", self.namespace

    def unplug(self):
        namespaces.ip_batch([f"link set {self._cable} down"])

    def plug(self):
        namespaces.ip_batch([f"link set {self._cable} up"])


@contextmanager
def far_mac():
    with ExitStack() as opened:
        number, file = namespaces.claim()
        opened.callback(namespaces.release, number, file)
        yield FarMac(number)


@pytest.mark.privileged
@pytest.mark.skipif(
    namespaces.missing_requirement() is not None, reason=str(namespaces.missing_requirement())
)
def test_the_standby_serves_while_the_active_router_is_cut_off(tmp_path, record_property):
    """Clients still reach the old router, but it reaches neither nodes nor the standby."""
    with (
        far_mac() as mac,
        two_routers(tmp_path, mac) as (nodes, one, two),
    ):
        assert ask(two, "by way of the standby").status_code == 200
        old = shown(one)["term"]
        with streams_through(one):
            mac.unplug()
            seconds = seconds_until_served(two)
            record_property("seconds until a new turn was served", seconds)
            print(f"new turns after {seconds:.2f} s")
            assert (shown(one)["role"], shown(two)["role"]) == ("standby", "active")
            assert shown(two)["term"] > old
            check_refused(nodes, old)
            refused = ask(one, "by way of the old one")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "no_active_router"
            mac.plug()
            check_follows(one, two)
        assert (shown(one)["role"], shown(two)["role"]) == ("standby", "active")
