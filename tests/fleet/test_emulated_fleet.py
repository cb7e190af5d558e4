"""Emulated Macs: their links, their faults, and their complete removal."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import namespaces
from benchmarks.emulated_fleet import EmulatedFleet, FleetError, missing_requirement

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.nightly,  # emulated Macs
    pytest.mark.privileged,
    pytest.mark.skipif(
        missing_requirement() is not None, reason=f"no emulated Macs: {missing_requirement()}"
    ),
]
PIPE = subprocess.PIPE

# Receives until the end of the stream, then prints the number of bytes.
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000)); print("ready", flush=True)
connection, _ = server.accept()
got = 0
while data := connection.recv(1 << 20): got += len(data)
print(got, flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), 10) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
REACH = """
import socket, sys
try: socket.create_connection((sys.argv[1], 9), 0.5)
except ConnectionRefusedError: print("reached")
except OSError: print("lost")
"""


def python(fleet, mac, script, *argv):
    command = [sys.executable, "-c", script, *map(str, argv)]
    return fleet.exec(mac, command, stdout=PIPE, stderr=PIPE, text=True)


def reach(fleet, mac, host):
    """Return "reached" if a connection attempt is refused, as no server listens; else "lost"."""
    out, error = python(fleet, mac, REACH, host).communicate(timeout=60)
    assert out, error
    return out.strip()


@pytest.fixture(scope="module")
def fleet():
    with EmulatedFleet(
        macs=3, ethernet_mbit=200, thunderbolt_mbit=1000, host_link=True
    ) as emulated:
        yield emulated


def test_traffic_uses_the_link_of_its_address(fleet):
    size_bytes = 2_000_000
    for host, device in (
        (fleet.thunderbolt_host(1, 0), fleet.thunderbolt_device(0, 1)),
        (fleet.ethernet_host(1), "en0"),
    ):
        before = {name: fleet.sent_bytes(0, name) for name in fleet.devices(0)}
        listener = python(fleet, 1, LISTEN, host)
        assert listener.stdout.readline() == "ready\n"
        assert python(fleet, 0, SEND, host, size_bytes).wait(60) == 0
        assert listener.communicate(timeout=60)[0] == f"{size_bytes}\n"
        sent = {name: fleet.sent_bytes(0, name) - before[name] for name in fleet.devices(0)}
        assert sent[device] >= size_bytes
        assert sum(sent.values()) - sent[device] < 10_000


def test_mac_lists_its_links_with_their_kinds(fleet):
    script = "from node.net.addresses import local_addresses as found; "
    script += "print(*((i.host, i.kind.value) for i in found(7000)))"
    argv = [sys.executable, "-c", script]
    child = fleet.exec(0, argv, stdout=PIPE, text=True, env={"PYTHONPATH": str(ROOT)})
    out, _ = child.communicate(timeout=60)

    assert f"('{fleet.ethernet_host(0)}', 'ethernet')" in out
    for peer in (1, 2):
        assert f"('{fleet.thunderbolt_host(0, peer)}', 'thunderbolt')" in out


def test_link_rates_change_at_run_time(fleet):
    def rates():
        text = namespaces.run("tc", "-n", fleet.namespace(0), "-j", "qdisc", "show")
        rows = {row["dev"]: row for row in json.loads(text) if row["kind"] == "tbf"}
        return {device: row["options"]["rate"] * 8 // 1_000_000 for device, row in rows.items()}

    assert rates() == {"en0": 200, "thunderbolt0": 1000, "thunderbolt1": 1000}
    fleet.shape(ethernet_mbit=50)
    assert rates() == {"en0": 50, "thunderbolt0": 1000, "thunderbolt1": 1000}
    fleet.shape(ethernet_mbit=200, thunderbolt_mbit=0)
    assert rates() == {"en0": 200}
    fleet.shape(thunderbolt_mbit=1000)
    assert len(rates()) == 3


@pytest.mark.parametrize("device", ["en0", "thunderbolt0"])
def test_cut_cable_disables_one_link_only(fleet, device):
    hosts = {"en0": fleet.ethernet_host(1), "thunderbolt0": fleet.thunderbolt_host(1, 0)}
    fleet.cut(0, device)
    try:
        assert {name: reach(fleet, 0, host) for name, host in hosts.items()} == {
            name: "lost" if name == device else "reached" for name in hosts
        }
    finally:
        fleet.restore(0, device)
    assert reach(fleet, 0, hosts[device]) == "reached"


def test_blocked_direction_affects_all_links_of_two_macs_only(fleet):
    fleet.block(0, 1)
    try:
        assert reach(fleet, 0, fleet.ethernet_host(1)) == "lost"
        assert reach(fleet, 0, fleet.thunderbolt_host(1, 0)) == "lost"
        assert reach(fleet, 0, fleet.ethernet_host(2)) == "reached"
        # Packets from 1 to 0 still arrive; the answers of 0 are lost.
        with_counter = fleet.exec(0, ["sh", "-c", "cat /proc/net/snmp"], stdout=PIPE, text=True)
        before = opened(with_counter.communicate(timeout=60)[0])
        assert reach(fleet, 1, fleet.ethernet_host(0)) == "lost"
        again = fleet.exec(0, ["cat", "/proc/net/snmp"], stdout=PIPE, text=True)
        assert opened(again.communicate(timeout=60)[0]) > before
    finally:
        fleet.unblock(0, 1)
    assert reach(fleet, 0, fleet.ethernet_host(1)) == "reached"
    assert reach(fleet, 0, fleet.thunderbolt_host(1, 0)) == "reached"


def opened(snmp):
    """Return how many TCP segments arrived, from /proc/net/snmp."""
    names, values = (line.split() for line in snmp.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["InSegs"])


def test_host_link_reaches_the_ethernet(fleet):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((fleet.ethernet_host(2), 9), 5)


def test_fleets_are_isolated_and_removed_completely(fleet):
    with EmulatedFleet(macs=1, thunderbolt_mbit=None) as other:
        assert other.number != fleet.number
        assert other.devices(0) == ["en0"]
        assert reach(other, 0, fleet.ethernet_host(0)) == "lost"
        deaf = ["sh", "-c", "trap '' TERM; echo deaf; while sleep 1; do :; done"]
        sleeper = other.exec(0, deaf, stdout=PIPE, text=True)
        assert sleeper.stdout.readline() == "deaf\n"
        name = other.namespace(0)
    assert sleeper.returncode == -signal.SIGKILL
    assert name not in namespaces.run("ip", "netns", "list")


def test_fleet_of_a_killed_owner_is_removed(tmp_path):
    up = [sys.executable, "-m", "benchmarks.fleet_command", "up", "--macs=1", "--json"]
    owner = subprocess.Popen(up, stdout=PIPE, text=True, cwd=ROOT)
    view = json.loads(owner.stdout.readline())
    inside = namespaces.run("ip", "netns", "list")
    assert view["macs"][0]["namespace"] in inside
    owner.kill()
    owner.wait()
    owner.stdout.close()

    deadline_s = time.monotonic() + 90
    while view["macs"][0]["namespace"] in namespaces.run("ip", "netns", "list"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def command(*argv):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fleet_command", *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_fleet_command_works_on_a_fleet_of_another_process(fleet):
    number = str(fleet.number)
    status, out, error = command("exec", "--fleet", number, "2", "ip", "-br", "addr", "show", "en0")
    assert (status, fleet.ethernet_host(2) in out) == (0, True), error
    rows = json.loads(command("list", "--json")[1])
    assert [row["owner_pid"] for row in rows if row["fleet"] == fleet.number] == [os.getpid()]

    assert command("cut", "--fleet", number, "0", "en0")[0] == 0
    assert reach(fleet, 0, fleet.ethernet_host(1)) == "lost"
    assert command("restore", "--fleet", number, "0", "en0")[0] == 0
    assert reach(fleet, 0, fleet.ethernet_host(1)) == "reached"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("cut", "--fleet", "N", "0", "en9"), "Mac 0 has no en9"),
        (("exec", "--fleet", "N", "9", "true"), "there is no Mac 9"),
        (("exec", "--fleet", "99", "0", "true"), "name a fleet"),
        (("down", "--fleet", "N"), "belongs to process"),
        (("block", "--fleet", "N", "0", "7"), "there is no"),
    ],
)
def test_invalid_fleet_command_is_rejected(fleet, argv, message):
    status, _, error = command(*(str(fleet.number) if word == "N" else word for word in argv))

    assert status == 1
    assert message in error
    assert "Traceback" not in error


def test_macs_without_a_cable_have_no_link():
    with EmulatedFleet(macs=3, cables=[(2, 1)]) as emulated:
        assert [emulated.devices(mac) for mac in range(3)] == [
            ["en0"],
            ["en0", "thunderbolt0"],
            ["en0", "thunderbolt0"],
        ]
        with pytest.raises(FleetError, match="no cable between Macs 0 and 1"):
            emulated.thunderbolt_host(0, 1)
