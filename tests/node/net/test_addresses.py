"""Links are classified from recorded macOS listings, and from sysfs on Linux."""

import socket
import sys

import pytest

from fabric.errors import RejectedError
from fabric.net.interfaces import (
    Interface,
    darwin_kind,
    interfaces_reaching,
    parse_hardware_ports,
    parse_ifconfig,
)
from fabric.net.links import Address, AddressScope, LinkKind, slower_kind
from node.net.addresses import connect, dial, local_addresses
from node.net.interfaces import (
    INTERFACES_LISTING_S,
    Listing,
    linux_kind,
    linux_speed_mbit,
    list_interfaces,
)

THUNDERBOLT, ETHERNET, WIFI = LinkKind.THUNDERBOLT, LinkKind.ETHERNET, LinkKind.WIFI

STUDIO_PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:5e:00:53:03

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 00:00:5e:00:53:04

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 00:00:5e:00:53:05

Hardware Port: USB 10/100/1G/2.5G LAN
Device: en7
Ethernet Address: 00:00:5e:00:53:06

VLAN Configurations
===================
"""

STUDIO_IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
	options=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
	inet 127.0.0.1 netmask 0xff000000
	inet6 ::1 prefixlen 128
	inet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
gif0: flags=8010<POINTOPOINT,MULTICAST> mtu 1280
anpi0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	ether 00:00:5e:00:53:0a
	media: none
	status: inactive
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	options=567<RXCSUM,TXCSUM,VLAN_MTU,TSO4,TSO6,AV,CHANNEL_IO>
	ether 00:00:5e:00:53:01
	inet6 fe80::10aa%en0 prefixlen 64 secured scopeid 0xc
	inet 192.168.1.20 netmask 0xffffff00 broadcast 192.168.1.255
	inet 192.168.1.21 netmask 0xffffffff broadcast 192.168.1.21
	nd6 options=201<PERFORMNUD,DAD>
	media: autoselect (10Gbase-T <full-duplex,flow-control>)
	status: active
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	ether 00:00:5e:00:53:03
	inet 192.168.1.33 netmask 0xffffff00 broadcast 192.168.1.255
	media: autoselect
	status: active
en2: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
	ether 00:00:5e:00:53:04
	media: autoselect <full-duplex>
	status: inactive
en7: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	inet 10.0.9.2 netmask 0xffffff00 broadcast 10.0.9.255
	media: autoselect (2500Base-T <full-duplex>)
	status: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	ether 00:00:5e:00:53:02
	inet 169.254.33.7 netmask 0xffff0000 broadcast 169.254.255.255
	Configuration:
		id 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
	member: en2 flags=3<LEARNING,DISCOVER>
	media: <unknown type>
	status: active
bridge100: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500
	inet 192.168.64.1 netmask 0xffffff00 broadcast 192.168.64.255
	status: active
awdl0: flags=8943<UP,BROADCAST,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
	status: active
utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1280
	inet 100.101.102.103 --> 100.101.102.103 netmask 0xffffffff
en9: flags=8822<BROADCAST,SMART,SIMPLEX,MULTICAST> mtu 1500
	inet 10.9.9.9 netmask 0xffffff00 broadcast 10.9.9.255
"""


def test_recorded_mac_studio_listing_is_classified():
    found = parse_ifconfig(STUDIO_IFCONFIG, parse_hardware_ports(STUDIO_PORTS))

    assert found == [
        Interface("lo0", "127.0.0.1", LinkKind.LOOPBACK, 0, 8),
        Interface("en0", "192.168.1.20", ETHERNET, 10_000, 24),
        Interface("en0", "192.168.1.21", ETHERNET, 10_000, 32),
        Interface("en1", "192.168.1.33", WIFI, 0, 24),
        Interface("en7", "10.0.9.2", ETHERNET, 2_500, 24),
        Interface("bridge0", "169.254.33.7", THUNDERBOLT, 0, 16),
        Interface("utun4", "100.101.102.103", LinkKind.OTHER, 0, 32),
    ]


BOTH_CABLES = [
    Interface("en0", "10.0.0.1", ETHERNET, 1_000, 24),
    Interface("en0", "10.0.0.9", ETHERNET, 1_000, 24),
    Interface("en1", "10.0.0.3", WIFI, 0, 24),
    Interface("bridge0", "10.0.0.5", THUNDERBOLT, 0, 24),
    Interface("lo0", "127.0.0.1", LinkKind.LOOPBACK, 0, 8),
]


@pytest.mark.parametrize(
    ("host", "kind", "interfaces", "devices"),
    [
        # One network on each cable: the network decides.
        ("192.168.1.9", ETHERNET, "studio", ["en0", "en1"]),
        ("169.254.9.9", THUNDERBOLT, "studio", ["bridge0"]),
        ("10.0.9.9", ETHERNET, "studio", ["en7"]),
        # All in one network: the peer's report of its end decides.
        ("10.0.0.2", THUNDERBOLT, "both", ["bridge0", "en0", "en1"]),
        ("10.0.0.2", ETHERNET, "both", ["en0", "en1", "bridge0"]),
        ("10.0.0.2", WIFI, "both", ["en0", "en1", "bridge0"]),
        ("10.0.0.2", None, "both", ["bridge0", "en0", "en1"]),
        # Routed, this machine's own, loopback, and IPv6 are left to the system.
        ("192.168.2.9", ETHERNET, "studio", []),
        ("10.0.0.9", ETHERNET, "both", []),
        ("127.0.0.7", LinkKind.LOOPBACK, "both", []),
        ("fd00::1", ETHERNET, "both", []),
    ],
)
def test_interfaces_towards_a_peer_are_those_in_its_network(host, kind, interfaces, devices):
    studio = parse_ifconfig(STUDIO_IFCONFIG, parse_hardware_ports(STUDIO_PORTS))
    found = interfaces_reaching(host, kind, {"studio": studio, "both": BOTH_CABLES}[interfaces])

    assert [interface.device for interface in found] == devices


def test_path_kind_is_that_of_its_slower_end():
    assert slower_kind(ETHERNET, WIFI) is slower_kind(WIFI, ETHERNET) is WIFI
    assert slower_kind(THUNDERBOLT, THUNDERBOLT) is THUNDERBOLT


@pytest.mark.parametrize(
    ("device", "port", "kind"),
    [
        ("bridge0", "Thunderbolt Bridge", LinkKind.THUNDERBOLT),
        ("bridge0", "Thunderbolt-Brücke", LinkKind.THUNDERBOLT),
        ("en4", "Thunderbolt 3", LinkKind.THUNDERBOLT),
        ("en5", "Thunderbolt Ethernet Slot 1", LinkKind.ETHERNET),
        ("en6", "Ethernet Adapter (en6)", LinkKind.ETHERNET),
        ("en0", "Wi-Fi", LinkKind.WIFI),
        ("en8", "iPhone USB", LinkKind.OTHER),
        ("utun2", "", LinkKind.OTHER),
    ],
)
def test_link_kind_follows_from_the_port_name(device, port, kind):
    assert darwin_kind(device, {device: port}) is kind


@pytest.mark.parametrize(
    ("media", "mbit"),
    [
        ("autoselect (1000baseT <full-duplex,energy-efficient-ethernet>)", 1_000),
        ("autoselect (5000Base-T <full-duplex>)", 5_000),
        ("100baseTX <full-duplex>", 0),
        ("autoselect <full-duplex>", 0),
    ],
)
def test_nominal_speed_is_read_from_the_media_line(media, mbit):
    text = f"en0: flags=8863<UP,RUNNING> mtu 1500\n\tinet 10.0.0.1 netmask 0\n\tmedia: {media}\n"

    assert [i.speed_mbit for i in parse_ifconfig(text, {})] == [mbit]


@pytest.mark.parametrize("text", ["", "nonsense", "en0: flags=zz<UP>\n", "Hardware Port: x\n"])
def test_unparsable_output_yields_no_interfaces(text):
    assert parse_ifconfig(text, parse_hardware_ports(text)) == []


@pytest.fixture
def sysfs(tmp_path):
    devices = {
        "enp3s0": {"type": "1", "speed": "2500"},
        "wlan0": {"type": "1", "wireless/status": ""},
        "wlp2s0": {"type": "1", "phy80211/name": "phy0"},
        "thunderbolt0": {"type": "1", "speed": "20000"},
        "bridge0": {"type": "1", "speed": "10000"},
        "eth0": {"type": "1", "speed": "-1"},
        "wg0": {"type": "65534"},
        "tun3": {"type": "1"},
    }
    for device, attributes in devices.items():
        for name, text in attributes.items():
            path = tmp_path / device / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("device", "kind", "mbit"),
    [
        ("enp3s0", LinkKind.ETHERNET, 2_500),
        ("wlan0", LinkKind.WIFI, 0),
        ("wlp2s0", LinkKind.WIFI, 0),
        ("thunderbolt0", LinkKind.THUNDERBOLT, 20_000),
        ("bridge0", LinkKind.THUNDERBOLT, 10_000),
        ("eth0", LinkKind.ETHERNET, 0),
        ("wg0", LinkKind.OTHER, 0),
        ("tun3", LinkKind.OTHER, 0),
        ("gone0", LinkKind.OTHER, 0),
    ],
)
def test_linux_link_kind_and_speed_are_read_from_sysfs(sysfs, device, kind, mbit):
    assert linux_kind(device, sysfs) is kind
    assert linux_speed_mbit(device, sysfs) == mbit


def test_interfaces_of_this_machine_include_loopback():
    found = [i for i in list_interfaces() if i.kind is LinkKind.LOOPBACK]

    assert "127.0.0.1" in [i.host for i in found]


def test_single_requested_host_is_listed():
    (own,) = local_addresses(7, "127.0.0.1")
    (unlisted,) = local_addresses(7, "127.0.0.9")

    assert (own.kind, own.scope, own.prefix_bits) == (LinkKind.LOOPBACK, AddressScope.MACHINE, 8)
    assert own.device
    assert (unlisted.kind, unlisted.device) == (LinkKind.LOOPBACK, "")
    assert local_addresses(7, "192.0.2.1")[0].kind is LinkKind.OTHER


def test_addresses_are_listed_most_promising_first():
    found = parse_ifconfig(STUDIO_IFCONFIG, parse_hardware_ports(STUDIO_PORTS))
    addresses = local_addresses(7, interfaces=found)

    assert addresses[0] == Address(
        "169.254.33.7", 7, THUNDERBOLT, 0, "bridge0", AddressScope.LINK, 16
    )
    assert [a.host for a in addresses[1:]] == [
        "192.168.1.20",
        "192.168.1.21",
        "10.0.9.2",
        "192.168.1.33",
        "100.101.102.103",
    ]


def test_loopback_is_listed_without_other_interfaces():
    only = [Interface("lo", "127.0.0.1", LinkKind.LOOPBACK)]

    assert [a.host for a in local_addresses(7, interfaces=only)] == ["127.0.0.1"]


def test_listing_is_cached_until_expiry_or_refresh():
    listings, now_s = [], [0.0]

    def list_now():
        listings.append(now_s[0])
        return [Interface("en0", f"10.0.0.{len(listings)}", ETHERNET)]

    listing = Listing(list_now, lambda: now_s[0])
    assert listing.current() is listing.latest() is listing.current()
    now_s[0] = INTERFACES_LISTING_S
    assert listing.latest()[0].host == "10.0.0.1"
    assert listing.current()[0].host == "10.0.0.2"
    assert listing.refresh()[0].host == "10.0.0.3"
    assert listings == [0.0, INTERFACES_LISTING_S, INTERFACES_LISTING_S]


@pytest.mark.parametrize("host", ["localhost", "mac.local", "", "1.2.3", "127.0.0.1\x00"])
def test_host_names_are_never_resolved(host):
    with pytest.raises(RejectedError):
        connect(host, 1, 0.1)


def test_dial_connects_to_a_listener_and_reports_a_closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        dialled = dial("127.0.0.1", port, 1.0)
        with dialled.sock, listener.accept()[0] as accepted:
            assert dialled.interface is None
            assert accepted.getpeername() == dialled.sock.getsockname()
    with pytest.raises(OSError, match="refused"):
        connect("127.0.0.1", port, 1.0)


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS")
def test_mac_lists_its_physical_links():
    assert any(i.kind is not LinkKind.LOOPBACK for i in list_interfaces())
