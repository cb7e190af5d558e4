"""Each interface has its own listening socket, at all addresses or at its own."""

import socket

import pytest

from fabric.net.interfaces import Interface
from fabric.net.links import LinkKind
from node.net.listeners import EVERYWHERE, Listeners

CABLE = Interface("lo", "127.0.0.2", LinkKind.THUNDERBOLT, 0, 8)
OTHER = Interface("lo", "127.0.0.3", LinkKind.ETHERNET, 0, 8)


@pytest.fixture
def own_hosts(monkeypatch):
    """Listen as on macOS, which binds a socket to an interface with an option of its own."""
    bound = []
    monkeypatch.setattr("node.net.listeners.bind_to_device", lambda _, device: bound.append(device))
    listeners = Listeners(EVERYWHERE, 0, at_own_hosts=True)
    yield listeners, bound
    listeners.close()


def hosts(listeners):
    return {sock.getsockname()[0] for sock in listeners.sockets}


def require(host):
    with socket.socket() as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} is no address of this machine")


def test_sockets_follow_changes_of_interface_addresses(own_hosts):
    require(CABLE.host)
    listeners, bound = own_hosts
    listeners.follow([CABLE])
    assert hosts(listeners) == {EVERYWHERE, CABLE.host}
    listeners.follow([CABLE, OTHER])
    assert hosts(listeners) == {EVERYWHERE, CABLE.host, OTHER.host}
    listeners.follow([OTHER])
    assert hosts(listeners) == {EVERYWHERE, OTHER.host}
    assert bound == ["lo", "lo"]


def test_connection_is_accepted_by_the_socket_of_its_address(own_hosts):
    require(CABLE.host)
    listeners, _ = own_hosts
    listeners.follow([CABLE, OTHER])
    by_host = {sock.getsockname()[0]: sock for sock in listeners.sockets}
    for host in (CABLE.host, OTHER.host):
        with socket.create_connection((host, listeners.port)):
            by_host[host].setblocking(True)
            by_host[host].settimeout(60)
            accepted, _ = by_host[host].accept()
            assert accepted.getsockname()[0] == host
            accepted.close()


def test_vanished_address_affects_its_own_socket_only(own_hosts):
    require(CABLE.host)
    listeners, _ = own_hosts
    gone = Interface("lo", "203.0.113.9", LinkKind.ETHERNET, 0, 24)
    listeners.follow([gone, CABLE])
    assert hosts(listeners) == {EVERYWHERE, CABLE.host}
