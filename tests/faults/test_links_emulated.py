"""Two emulated Macs with two cables: connections use their cable, and a pulled one is detected."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import namespaces
from benchmarks.emulated_fleet import EmulatedFleet, missing_requirement
from fabric.limits import KIB, MIB

pytestmark = [
    pytest.mark.nightly,  # emulated Macs
    pytest.mark.privileged,
    pytest.mark.skipif(
        missing_requirement() is not None, reason=f"no emulated Macs: {missing_requirement()}"
    ),
]
STATION = Path(__file__).resolve().parents[1] / "support" / "link_station.py"
WAIT_S = 60.0
CABLE = "thunderbolt0"
NAMES = ("mac-a", "mac-b")


class Station:
    """The data plane of one Mac."""

    def __init__(self, fleet, mac):
        self.mac, self.name = mac, NAMES[mac]
        argv = [sys.executable, str(STATION), self.name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.child = fleet.exec(mac, argv, **pipes)
        self.update_addresses()

    def update_addresses(self):
        """Update this Mac's addresses; a cable that was just plugged in takes a moment."""
        deadline_s = time.monotonic() + WAIT_S
        while len(addresses := self.send_order("refresh")) < 2:
            assert time.monotonic() < deadline_s, addresses
            time.sleep(0.05)
        self.addresses = addresses

    def send_order(self, do, **order):
        self.child.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        assert line, f"{self.name} has ended"
        return json.loads(line)

    def set_peers(self, other):
        peer = {"name": other.name, "incarnation": 1, "addresses": other.addresses}
        self.send_order("meet", call={"peers": [peer]})

    def views(self):
        return {view["peer_device"]: view for view in self.send_order("views")}

    def until(self, holds):
        deadline_s = time.monotonic() + WAIT_S
        while not holds(views := self.views()):
            assert time.monotonic() < deadline_s, views
            time.sleep(0.05)
        return views


@pytest.fixture(scope="module")
def fleet():
    with EmulatedFleet(macs=2, ethernet_mbit=100, thunderbolt_mbit=1000) as emulated:
        yield emulated


@pytest.fixture(scope="module")
def stations(fleet):
    return [Station(fleet, mac) for mac in range(2)]


def sent_bytes_by_device(fleet, stations, device):
    """Return the bytes that each device of the source sends while the target fetches by one."""
    source, target = stations
    (address,) = (a for a in source.addresses if a["device"] == device)
    before = {name: fleet.sent_bytes(0, name) for name in fleet.devices(0)}
    back = {name: fleet.sent_bytes(1, name) for name in fleet.devices(1)}
    measured = target.send_order("probe", peer=source.name, address=address, bytes=MIB)
    assert measured == {"moved": MIB, "device": device, "problem": None}
    out = {name: fleet.sent_bytes(0, name) - count for name, count in before.items()}
    requests_sent_bytes = {name: fleet.sent_bytes(1, name) - count for name, count in back.items()}
    return out, requests_sent_bytes


@pytest.fixture
def join_networks(fleet):
    """Put both cables of both Macs into one network, where routes choose the wrong cable."""
    hosts = [fleet.ethernet_host(mac).rsplit(".", 1) for mac in range(2)]
    old = [fleet.thunderbolt_host(mac, 1 - mac) for mac in range(2)]
    for mac, (network, last) in enumerate(hosts):
        lines = [
            f"addr del {old[mac]}/24 dev {CABLE}",
            f"addr add {network}.{int(last) + 100}/24 dev {CABLE}",
        ]
        namespaces.ip_batch(lines, fleet.namespace(mac))
    yield
    for mac, (network, last) in enumerate(hosts):
        lines = [
            f"addr del {network}.{int(last) + 100}/24 dev {CABLE}",
            f"addr add {old[mac]}/24 dev {CABLE}",
        ]
        namespaces.ip_batch(lines, fleet.namespace(mac))


@pytest.mark.parametrize("device", ["en0", CABLE])
def test_transfer_uses_the_cable_of_its_address(fleet, stations, device):
    other = CABLE if device == "en0" else "en0"
    out, requests_sent_bytes = sent_bytes_by_device(fleet, stations, device)

    assert out[device] >= MIB
    assert requests_sent_bytes[device] > 0
    assert out[other] + requests_sent_bytes[other] < 16 * KIB


@pytest.mark.parametrize("device", ["en0", CABLE])
def test_transfer_uses_its_cable_when_both_share_a_network(fleet, stations, join_networks, device):
    for station in stations:
        station.update_addresses()
    other = CABLE if device == "en0" else "en0"
    out, requests_sent_bytes = sent_bytes_by_device(fleet, stations, device)

    assert out[device] >= MIB
    assert requests_sent_bytes[device] > 0
    assert out[other] + requests_sent_bytes[other] < 16 * KIB


def test_links_are_measured_and_a_pulled_cable_is_detected(fleet, stations):
    for station in stations:
        station.update_addresses()
    source, target = stations
    target.send_order("start")
    target.set_peers(source)

    def have_rates(views):
        return len(views) == 2 and all(view["bytes_per_s"] for view in views.values())

    views = target.until(have_rates)
    assert {device: view["kind"] for device, view in views.items()} == {
        "en0": "ethernet",
        CABLE: "thunderbolt",
    }
    assert {device: view["device"] for device, view in views.items()} == {
        "en0": "en0",
        CABLE: CABLE,
    }
    # Rates are ten to one; a short probe measures part of each token bucket's initial fill.
    assert views[CABLE]["bytes_per_s"] > 2 * views["en0"]["bytes_per_s"]

    fleet.cut(1, CABLE)
    lost = target.until(lambda views: views[CABLE]["reachable"] is False)
    assert lost["en0"]["reachable"]
    assert lost[CABLE]["problem"]
    fleet.restore(1, CABLE)
    target.until(lambda views: views[CABLE]["reachable"])
