"""The links between nodes: addresses, peers and measurements.

A link is a pair: this machine's interface and one address of a peer. Several may join the same
two machines, such as a Thunderbolt cable and the office's Ethernet.
"""

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from fabric.errors import TooLargeError
from fabric.ids import NodeName
from fabric.limits import ADDRESSES_MAX, PEERS_MAX


class LinkKind(StrEnum):
    """Medium that a network address is reached over."""

    THUNDERBOLT = "thunderbolt"
    ETHERNET = "ethernet"
    WIFI = "wifi"
    LOOPBACK = "loopback"
    OTHER = "other"


class AddressScope(StrEnum):
    """Network within which an address can be reached."""

    MACHINE = "machine"  # 127.0.0.0/8
    LINK = "link"  # 169.254.0.0/16: the cable's other end only
    SITE = "site"
    GLOBAL = "global"


LIKELY_ORDER = (
    LinkKind.THUNDERBOLT,
    LinkKind.ETHERNET,
    LinkKind.WIFI,
    LinkKind.OTHER,
    LinkKind.LOOPBACK,
)

# Assumed where the system does not say.
_ASSUMED_MBIT = {
    LinkKind.THUNDERBOLT: 10_000,
    LinkKind.ETHERNET: 1_000,
    LinkKind.WIFI: 300,
    LinkKind.LOOPBACK: 40_000,
    LinkKind.OTHER: 100,
}


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a node's data plane."""

    host: str
    port: int
    kind: LinkKind
    speed_mbit: int = 0  # nominal; 0 where the system does not say
    device: str = ""  # the node's own name for the interface; "" where it lists none
    scope: AddressScope = AddressScope.SITE
    prefix_bits: int = 0  # of the interface's network; 0 where it is not known


@dataclass(frozen=True, slots=True)
class LinkView:
    """A node's view of its link to one address of a peer; rates are peer to node."""

    peer: NodeName
    host: str
    port: int
    kind: LinkKind  # the slower of both ends: Ethernet to Wi-Fi is Wi-Fi
    device: str = ""  # this node's interface; "" where the system routes
    peer_device: str = ""
    reachable: bool | None = None  # None: not tried yet
    problem: str | None = None  # a code of `node.net.probe`
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    age_s: float | None = None  # since the last answer over this link
    rate_age_s: float | None = None  # since the rate was measured


@dataclass(frozen=True, slots=True)
class PeerNode:
    """Another node and where it listens."""

    name: NodeName
    incarnation: int
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class PeerList:
    """Call that replaces a node's list of all other nodes; idempotent."""

    peers: tuple[PeerNode, ...]

    def __post_init__(self) -> None:
        """Raise TooLargeError if the list has too many peers or addresses."""
        most = max((len(peer.addresses) for peer in self.peers), default=0)
        if len(self.peers) > PEERS_MAX or most > ADDRESSES_MAX:
            message = f"a list may have at most {PEERS_MAX} peers of {ADDRESSES_MAX} addresses each"
            raise TooLargeError(message)


def scope_of(host: str) -> AddressScope:
    """Return an address literal's scope; raise ValueError for anything else."""
    address = ip_address(host)
    if address.is_loopback:
        return AddressScope.MACHINE
    if address.is_link_local:
        return AddressScope.LINK
    return AddressScope.GLOBAL if address.is_global else AddressScope.SITE


def nominal_bytes_per_s(address: Address) -> int:
    """Return the best rate of the link at `address`."""
    mbit = address.speed_mbit if address.speed_mbit > 0 else _ASSUMED_MBIT[address.kind]
    return mbit * 1_000_000 // 8


def slower_kind(one: LinkKind, other: LinkKind) -> LinkKind:
    """Return the slower of two interfaces' kinds, which is the kind of the path between them."""
    return max(one, other, key=LIKELY_ORDER.index)
