"""The doctor explains links and finds misconfigurations, from recorded answers and listings."""

import json

import pytest

from fabric.codec import to_plain
from fabric.ids import NodeName
from fabric.net.links import Address, AddressScope, LinkKind, LinkView
from router.cli.doctor.doctor_links import link_checks, link_rows, stations_of
from router.cli.doctor.doctor_network import (
    Route,
    darwin_checks,
    default_device,
    firewall_is_on,
    link_local_device,
    linux_checks,
    network_checks,
    parse_dhcp_packet,
    parse_netstat,
    parse_proc_route,
    sleep_minutes,
)
from tests.cli import fake_fabric

A, B = NodeName("node-a"), NodeName("node-b")
TB, LAN, WIFI = LinkKind.THUNDERBOLT, LinkKind.ETHERNET, LinkKind.WIFI
TB_A = Address("10.88.0.1", 7, TB, 0, "bridge0", AddressScope.SITE, 30)
TB_B = Address("10.88.0.2", 7, TB, 0, "bridge0", AddressScope.SITE, 30)
LAN_A = Address("192.168.1.10", 7, LAN, 1_000, "en0", AddressScope.SITE, 24)
LAN_B = Address("192.168.1.11", 7, LAN, 1_000, "en0", AddressScope.SITE, 24)
AFTER = "used when the faster one fails or is not enough"


def row(name, addresses, links):
    return {"name": name, "addresses": to_plain(tuple(addresses)), "links": to_plain(tuple(links))}


def link(host, kind, *, peer=B, device="", **known):
    return LinkView(peer, host, 7, kind, device, **known)


def checked_links(*rows):
    return [(c.name, c.verdict, c.detail) for c in link_checks(stations_of(rows))]


def test_both_links_between_two_macs_are_listed_in_order():
    fast = link("10.88.0.2", TB, device="bridge0", reachable=True, rtt_s=0.0003, bytes_per_s=1.1e9)
    slow = link("192.168.1.11", LAN, device="en0", reachable=True, rtt_s=0.0008, bytes_per_s=117e6)
    rows = [row(A, [TB_A, LAN_A], [slow, fast]), row(B, [TB_B, LAN_B], [])]

    assert checked_links(*rows) == [
        (
            "node-a from node-b",
            "ok",
            f"Ethernet 192.168.1.11 through en0: 0.8 ms, 117 MB/s; {AFTER}",
        ),
        (
            "node-a from node-b",
            "ok",
            "Thunderbolt 10.88.0.2 through bridge0: 0.3 ms, 1.1 GB/s; used first",
        ),
    ]
    listed = link_rows(stations_of(rows))
    assert [entry["first"] for entry in listed] == [False, True]
    assert json.loads(json.dumps(listed))[1]["peer"] == "node-b"


@pytest.mark.parametrize(
    ("host", "problem", "advice"),
    [
        ("192.168.1.11", "host_unreachable", "Local Network"),
        ("192.168.1.11", "silent", "firewall"),
        ("169.254.7.7", "silent", "static address"),
        ("169.254.7.7", "host_unreachable", "Local Network"),
        ("192.168.1.11", "wrong_node", "same address"),
        ("192.168.1.11", "bad_key", "cluster's key"),
        ("192.168.1.11", "fingerprint_mismatch", "different models"),
        ("192.168.1.11", "never_heard_of", "never_heard_of"),
    ],
)
def test_unused_link_states_reason_and_advice(host, problem, advice):
    dead = link(host, TB, reachable=False, problem=problem)
    ((_, verdict, detail),) = checked_links(row(A, [TB_A], [dead]))

    assert verdict == "warning"
    assert "not used" in detail
    assert advice in detail


def test_wifi_only_between_thunderbolt_macs_is_reported():
    wifi = link("192.168.1.33", WIFI, reachable=True, rtt_s=0.004, bytes_per_s=30e6)
    dead = link("10.88.0.2", TB, reachable=False, problem="silent")
    checks = checked_links(row(A, [TB_A, LAN_A], [wifi, dead]), row(B, [TB_B], []))

    assert any("both have Thunderbolt, but only Wi-Fi" in detail for _, _, detail in checks)
    other_without = checked_links(row(A, [TB_A, LAN_A], [wifi, dead]), row(B, [LAN_B], []))
    assert not any("both have" in detail for _, _, detail in other_without)


def test_two_interfaces_in_one_network_are_a_warning():
    bridged = Address("192.168.1.77", 7, TB, 0, "bridge0", AddressScope.SITE, 24)
    ((name, verdict, detail),) = checked_links(row(A, [bridged, LAN_A], []))

    assert (name, verdict) == ("node-a networks", "warning")
    assert "bridge0 192.168.1.77/24 and en0 192.168.1.10/24 are in one network" in detail
    assert checked_links(row(A, [TB_A, LAN_A], [])) == []


def test_self_assigned_thunderbolt_address_is_ok():
    own = Address("169.254.33.7", 7, TB, 0, "bridge0", AddressScope.LINK, 16)
    ((_, verdict, detail),) = checked_links(row(A, [own, LAN_A], []))

    assert verdict == "ok"
    assert "bridge0 169.254.33.7/16 has a self-assigned address" in detail


@pytest.mark.parametrize("links", [None, "x", [{"peer": 1}], [{"unknown": 1}]])
def test_node_with_unreadable_links_is_skipped(links):
    assert stations_of([{"name": "node-a", "addresses": [], "links": links}]) == []


# --- output of macOS commands ---------------------------------------------------------------------

NETSTAT = """Routing tables

Internet:
Destination        Gateway            Flags               Netif Expire
default            192.168.1.1        UGScg                 en0
default            10.88.0.2          UGScIg            bridge0
127                127.0.0.1          UCS                   lo0
169.254            link#12            UCS                   en0      !
169.254.33.7/32    link#18            UCS               bridge0      !
192.168.1          link#12            UCS                   en0      !
192.168.1.1        0:0:5e:0:53:ff     UHLWIir               en0   1168
"""
LEASE = """op = BOOTREPLY
htype = 1
hlen = 6
xid = 0x6b9d7fc9
ciaddr = 0.0.0.0
yiaddr = 192.168.1.77
siaddr = 192.168.1.1
chaddr = 00:00:5e:00:53:02
options:
Options count is 8
dhcp_message_type (uint8): ACK 0x5
server_identifier (ip): 192.168.1.1
lease_time (uint32): 0x15180
subnet_mask (ip): 255.255.255.0
router (ip_mult): {192.168.1.1}
end (none):
"""
PMSET = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                10 (sleep prevented by caffeinate)
 ttyskeepawake        1
 tcpkeepalive         1
 womp                 1
"""
PORTS = (
    "Hardware Port: Ethernet\nDevice: en0\n\nHardware Port: Thunderbolt Bridge\nDevice: bridge0\n"
)
IFCONFIG = """en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	inet 192.168.1.20 netmask 0xffffff00 broadcast 192.168.1.255
	status: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	inet {host} netmask 0xffff0000 broadcast 169.254.255.255
	status: {status}
"""
FIREWALL_ON = "Firewall is enabled. (State = 1)\n"


def mac(**prints):
    """Return a runner that prints these outputs by program name, or else the recordings."""
    recorded = {
        "networksetup": PORTS,
        "ifconfig": IFCONFIG.format(host="169.254.33.7", status="active"),
        "netstat": NETSTAT,
        "pmset": PMSET,
        **prints,
    }
    return lambda program, *_: recorded.get(program.rpartition("/")[2], "")


def checks_of(**prints):
    return {check.name: check for check in darwin_checks(mac(**prints))}


def test_every_network_misconfiguration_is_a_warning():
    checks = checks_of(
        ipconfig=LEASE,
        socketfilterfw=FIREWALL_ON,
        netstat=NETSTAT.replace("192.168.1.1        UGScg                 en0", "x U bridge0"),
    )

    assert {name for name, check in checks.items() if check.verdict == "warning"} == {
        "default route",
        "169.254 route",
        "Thunderbolt DHCP",
        "firewall",
        "sleep",
    }
    assert "192.168.1.77 by DHCP from 192.168.1.1" in checks["Thunderbolt DHCP"].detail
    assert "through en0, not bridge0" in checks["169.254 route"].detail
    assert "after 10 minutes" in checks["sleep"].detail


def test_well_configured_mac_has_no_warnings():
    checks = checks_of(
        ifconfig=IFCONFIG.format(host="10.88.0.1", status="active"),
        pmset=PMSET.replace("sleep                10", "sleep                0"),
        socketfilterfw="Firewall is disabled. (State = 0)\n",
    )

    assert {check.verdict for check in checks.values()} == {"ok"}
    assert checks["default route"].detail == "en0"


def test_mac_without_cable_or_command_output_is_ok():
    checks = checks_of(ifconfig=IFCONFIG.format(host="10.0.0.1", status="inactive"))
    assert "no cable" in checks["Thunderbolt"].detail
    assert [check.verdict for check in darwin_checks(lambda *_: "")] == ["ok", "ok"]


def test_routes_leases_and_settings_are_parsed():
    routes = parse_netstat(NETSTAT)

    assert routes[0] == Route("default", "en0")
    assert (default_device(routes), link_local_device(routes)) == ("en0", "en0")
    assert parse_dhcp_packet(LEASE) == ("192.168.1.77", "192.168.1.1")
    assert parse_dhcp_packet("yiaddr = 0.0.0.0\n") is None
    assert firewall_is_on("Firewall is enabled. (State = 2)") is True
    assert sleep_minutes(PMSET) == 10


@pytest.mark.parametrize("text", ["", "nonsense\n", "Destination\n\n", "State =", "Iface\nx y z\n"])
def test_malformed_output_is_ignored(text):
    assert parse_netstat(text) == []
    assert parse_proc_route(text) == []
    assert default_device(parse_netstat(text)) is None
    assert parse_dhcp_packet(text) is None
    assert firewall_is_on(text) is None
    assert sleep_minutes(text) is None


PROC_ROUTE = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU
{device}	00000000	0100580A	0003	0	0	0	00000000	0
eth0	0001A8C0	00000000	0001	0	0	0	00FFFFFF	0
"""


def test_linux_routes_are_parsed_and_checked():
    assert parse_proc_route(PROC_ROUTE.format(device="eth0")) == [
        Route("default", "eth0"),
        Route("192.168.1.0/24", "eth0"),
    ]
    assert [c.verdict for c in linux_checks(PROC_ROUTE.format(device="eth0"))] == ["ok"]
    assert [c.verdict for c in linux_checks(PROC_ROUTE.format(device="bridge0"))] == ["warning"]
    assert {check.verdict for check in network_checks()} <= {"ok", "warning"}


def test_doctor_prints_links_as_text_and_json(run, fabric, monkeypatch):
    view = link("192.168.1.11", LAN, device="en0", reachable=True, rtt_s=0.0008, bytes_per_s=117e6)
    healthy = {**fake_fabric.NODES[0], **row(A, [LAN_A], [view])}
    urls = ["http://127.0.0.1:8000", "http://[::1]:8000"]
    answers = {
        ("GET", "/v1/nodes"): {"object": "list", "data": [healthy]},
        ("GET", "/healthz"): {"status": "ok", "urls": urls},
    }
    monkeypatch.setattr(fake_fabric, "ANSWERS", answers)
    status, out, _ = run("doctor", "--url", fabric.url)
    printed = json.loads(run("doctor", "--url", fabric.url, "--json")[1])

    assert status == 0
    assert "ok       node-a from node-b: Ethernet 192.168.1.11 through en0: 0.8 ms" in out
    assert f"ok       fabric: at {urls[0]} and {urls[1]}; " in out
    assert "ok       localhost: 127.0.0.1" in out
    assert printed["links"][0]["words"].endswith("used first")
