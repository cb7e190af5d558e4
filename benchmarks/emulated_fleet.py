"""Emulated Macs on one Linux machine: namespaces, a slow Ethernet, fast direct cables.

Each Mac is a network namespace with a device `en0` on a switch of the fleet's own and one device
`thunderboltK` per cable to another Mac. `tc tbf` limits the send rate of each end. Several fleets
may exist at once; a fleet is removed when its owner ends, however that happens.

As a command: `python -m benchmarks.fleet_command up` keeps a fleet until it is interrupted; the
other verbs, from another terminal, work on it.
"""

import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Self

from benchmarks import namespaces
from benchmarks.namespaces import (
    FleetError,
    ip_batch,
    missing_requirement,
    run,
    shape_device,
    subnet,
)

__all__ = ["EmulatedFleet", "FleetError", "missing_requirement"]

MACS_MAX = 16
ETHERNET = "en0"
ETHERNET_MTU, THUNDERBOLT_MTU = 1500, 9000
NOWHERE = "02:00:00:00:00:01"  # an unused link address
END_GRACE_S = 1.0


@dataclass(slots=True)
class EmulatedFleet:
    """N Macs as network namespaces, for as long as the `with` block lasts.

    Rates are in Mbit/s and in each direction; 0 or None leaves Ethernet unshaped. For
    `thunderbolt_mbit` 0 means unshaped and None means no cables. `cables` are pairs of Macs; by
    default, every two Macs have one. With `host_link` this machine itself is on the Ethernet, as
    `laptop_host`.

    Raises:
        FleetError: the machine cannot run it; `missing_requirement()` names it in advance.
    """

    macs: int = 2
    ethernet_mbit: int | None = 1000
    thunderbolt_mbit: int | None = 10_000
    cables: Sequence[tuple[int, int]] | None = None
    host_link: bool = False
    by_command: bool = False  # created by `up`, so that `down` may end its owner
    number: int = -1
    owner_pid: int = field(default_factory=os.getpid)
    _file: IO[str] | None = None
    _guard: subprocess.Popen[bytes] | None = None
    _children: list[subprocess.Popen[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= self.macs <= MACS_MAX:
            message = f"a fleet has 1 to {MACS_MAX} Macs"
            raise FleetError(message)
        if self.cables is None:
            wanted = self.thunderbolt_mbit is not None
            self.cables = list(itertools.combinations(range(self.macs), 2)) if wanted else []
        self.cables = [(min(pair), max(pair)) for pair in self.cables]

    @classmethod
    def find(cls, number: int | None = None) -> Self:
        """Return another process's fleet; without a number, the only one created by `up`."""
        records = namespaces.records()
        started = [n for n, record in records.items() if record["by_command"]]
        if number is None and len(started) == 1:
            number = started[0]
        if number is None or number not in records:
            names = ", ".join(map(str, records)) or "none; start one with `up`"
            message = f"name a fleet with --fleet N (running: {names})"
            raise FleetError(message)
        record = records[number]
        pairs = [tuple(pair) for pair in record.pop("cables")]
        return cls(**record, cables=pairs, number=number)

    def __enter__(self) -> Self:
        reason = missing_requirement()
        if reason is not None:
            raise FleetError(reason)
        namespaces.sweep()
        self.number, self._file = namespaces.claim()
        try:
            self._guard = namespaces.start_guard(self.number)
            self._build()
            self.shape(ethernet_mbit=self.ethernet_mbit, thunderbolt_mbit=self.thunderbolt_mbit)
            namespaces.write_record(self._file, self.record())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the Macs' processes and remove the Macs."""
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        deadline_s = time.monotonic() + END_GRACE_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline_s - time.monotonic()))
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
        if self._file is not None:
            namespaces.release(self.number, self._file)
            self._file = None
        for child in self._children:
            child.wait()  # already killed
            for stream in filter(None, (child.stdin, child.stdout, child.stderr)):
                stream.close()
        self._children.clear()

    def record(self) -> dict[str, Any]:
        """Return the record by which another process can use this fleet."""
        keys = ("macs", "ethernet_mbit", "thunderbolt_mbit", "cables", "host_link")
        return {key: getattr(self, key) for key in (*keys, "by_command", "owner_pid")}

    # --- names and addresses -------------------------------------------------------------------

    def namespace(self, mac: int) -> str:
        """Return the name of a Mac's network namespace."""
        if not 0 <= mac < self.macs:
            message = f"there is no Mac {mac}: they are 0 to {self.macs - 1}"
            raise FleetError(message)
        return f"mf{self.number}-{self.owner_pid}-m{mac}"

    def ethernet_host(self, mac: int) -> str:
        """Return a Mac's address on the Ethernet."""
        return self._host(0, 10 + mac)

    @property
    def laptop_host(self) -> str:
        """This machine's address on the Ethernet, with `host_link`."""
        return self._host(0, 1)

    def thunderbolt_host(self, mac: int, peer: int) -> str:
        """Return the address of `mac` on its cable to `peer`."""
        return self._host(1 + self._cable(mac, peer), 10 + mac)

    def thunderbolt_device(self, mac: int, peer: int) -> str:
        """Return the device of `mac` that its cable to `peer` is in."""
        self._cable(mac, peer)  # or there is no such cable
        return f"thunderbolt{self._peers(mac).index(peer)}"

    def devices(self, mac: int) -> list[str]:
        """Return a Mac's devices, Ethernet first."""
        return [ETHERNET, *(f"thunderbolt{k}" for k in range(len(self._peers(mac))))]

    # --- processes and faults ------------------------------------------------------------------

    def exec(self, mac: int, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a process in a Mac; it ends with the fleet at the latest."""
        return self.spawn(["ip", "netns", "exec", self.namespace(mac), *argv], **popen)

    def spawn(self, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a process that ends with the fleet at the latest."""
        child = subprocess.Popen(argv, **popen)
        self._children.append(child)
        return child

    def shape(self, ethernet_mbit: int | None = None, thunderbolt_mbit: int | None = None) -> None:
        """Change rates, also of links in use; None keeps a rate, 0 removes its limit."""
        for mac in range(self.macs):
            if ethernet_mbit is not None:
                shape_device(self.namespace(mac), ETHERNET, ethernet_mbit)
                shape_device(self._switch, f"p{mac}", ethernet_mbit)
            if thunderbolt_mbit is not None:
                for device in self.devices(mac)[1:]:
                    shape_device(self.namespace(mac), device, thunderbolt_mbit)

    def cut(self, mac: int, device: str) -> None:
        """Pull a cable: the Mac's device loses its carrier, and its packets are lost silently.

        The other end, the switch's port or the other Mac's device, is switched off.
        """
        self._set_far_end(mac, device, "down")

    def restore(self, mac: int, device: str) -> None:
        """Plug a pulled cable in again."""
        self._set_far_end(mac, device, "up")

    def block(self, mac: int, peer: int) -> None:
        """Drop packets from `mac` to `peer` on every link; the other direction still works."""
        for device, host in self._ways(mac, peer):
            hole = ("lladdr", NOWHERE, "dev", device, "nud", "permanent")
            run("ip", "-n", self.namespace(mac), "neigh", "replace", host, *hole)

    def unblock(self, mac: int, peer: int) -> None:
        """Undo `block`."""
        for device, host in self._ways(mac, peer):
            run("ip", "-n", self.namespace(mac), "neigh", "del", host, "dev", device, check=False)

    def sent_bytes(self, mac: int, device: str) -> int:
        """Return the bytes that a device has sent since the fleet was created."""
        text = run("ip", "-n", self.namespace(mac), "-j", "-s", "link", "show", "dev", device)
        return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])

    # --- setup ---------------------------------------------------------------------------------

    @property
    def _switch(self) -> str:
        return f"mf{self.number}-{self.owner_pid}-sw"

    def _host(self, third: int, last: int) -> str:
        return str(subnet(self.number)[256 * third + last])

    def _cable(self, mac: int, peer: int) -> int:
        pair = (min(mac, peer), max(mac, peer))
        if self.cables is None or pair not in self.cables:
            message = f"there is no cable between Macs {mac} and {peer}"
            raise FleetError(message)
        return list(self.cables).index(pair)

    def _peers(self, mac: int) -> list[int]:
        """Return the peers of a Mac's cables, in the order of its devices."""
        return [b if a == mac else a for a, b in self.cables or [] if mac in (a, b)]

    def _ways(self, mac: int, peer: int) -> list[tuple[str, str]]:
        self.namespace(peer)  # or there is no such Mac
        ways = [(ETHERNET, self.ethernet_host(peer))]
        if peer in self._peers(mac):
            ways.append((self.thunderbolt_device(mac, peer), self.thunderbolt_host(peer, mac)))
        return ways

    def _set_far_end(self, mac: int, device: str, state: str) -> None:
        if device not in self.devices(mac):
            message = f"Mac {mac} has no {device}: it has {', '.join(self.devices(mac))}"
            raise FleetError(message)
        namespace, far = self._switch, f"p{mac}"
        if device != ETHERNET:
            peer = self._peers(mac)[self.devices(mac).index(device) - 1]
            namespace, far = self.namespace(peer), self.thunderbolt_device(peer, mac)
        run("ip", "-n", namespace, "link", "set", far, state)
        # The kernel notifies the other end, and the switch, up to a second later.
        namespaces.await_carrier(namespace, far, up=state == "up")
        namespaces.await_carrier(self.namespace(mac), device, up=state == "up")

    def _build(self) -> None:
        switch, macs = self._switch, [self.namespace(mac) for mac in range(self.macs)]
        ip_batch([f"netns add {name}" for name in (switch, *macs)])
        links, ports = [], [f"p{mac}" for mac in range(self.macs)]
        inside = {switch: ["link set lo up", "link add br0 type bridge", "link set br0 up"]}
        for mac, name in enumerate(macs):
            far = f"p{mac} netns {switch}"
            links.append(f"link add {ETHERNET} netns {name} type veth peer name {far}")
            inside[name] = ["link set lo up", *_address(self.ethernet_host(mac), ETHERNET)]
        for a, b in self.cables or []:
            one, two = self.thunderbolt_device(a, b), self.thunderbolt_device(b, a)
            far = f"{two} netns {macs[b]}"
            links.append(f"link add {one} netns {macs[a]} type veth peer name {far}")
            inside[macs[a]] += _address(self.thunderbolt_host(a, b), one, THUNDERBOLT_MTU)
            inside[macs[b]] += _address(self.thunderbolt_host(b, a), two, THUNDERBOLT_MTU)
        if self.host_link:
            laptop_end = namespaces.laptop_device(self.number)
            links.append(f"link add {laptop_end} type veth peer name laptop netns {switch}")
            links += _address(self.laptop_host, laptop_end)
            ports.append("laptop")
        inside[switch] += [f"link set {port} master br0 up" for port in ports]
        ip_batch(links)
        for name, lines in inside.items():
            ip_batch(lines, name)


def _address(host: str, device: str, mtu: int = ETHERNET_MTU) -> list[str]:
    return [f"addr add {host}/24 dev {device}", f"link set {device} mtu {mtu} up"]
