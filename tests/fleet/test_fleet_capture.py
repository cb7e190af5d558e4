"""Traffic of three Macs by Ethernet and cables, captured from `ray up` on, has no secrets."""

import json
import secrets
import time
from contextlib import ExitStack

import pytest

from benchmarks.emulated_fleet import ETHERNET, EmulatedFleet
from benchmarks.emulated_mac import ROOT, missing_requirement
from fabric.keys import CLUSTER_KEY, MEMBER_KEY, RAY_TOKEN
from tests.fleet.ray_up import KEY, NAMES, OPERATOR_KEY, RayUp, client_argv
from tests.support.packet_capture import Capture
from tests.support.wire_secrets import keys_of, parts_of

pytestmark = [
    pytest.mark.nightly,  # minutes on two cores, most of them Ray's starts
    pytest.mark.privileged,
    pytest.mark.slow,
    pytest.mark.skipif(
        missing_requirement() is not None, reason=f"no emulated Macs: {missing_requirement()}"
    ),
]
LAPTOP = len(NAMES)
CABLE = (0, 1)  # moves to and from the third Mac travel over Ethernet
LETTERS = "aeiloprstuvwz"
PLANT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    sock.sendall(bytes.fromhex(sys.argv[3]))
"""
TAKE = """
import socket
with socket.create_server(("0.0.0.0", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    with listener.accept()[0] as sock:
        while sock.recv(65536): pass
"""


def word():
    return "".join(secrets.choice(LETTERS) for _ in range(12))


def turn(fabric, agent, code):
    argv = client_argv(fabric.url, KEY, agent, code)
    reply = json.loads(fabric.on_laptop(*argv, timeout_s=120.0).splitlines()[-1])
    assert code in reply["text"]
    return reply["node"]


def secret_texts(fabric, agent, code):
    """Return the secrets by name, and separately the texts that may appear on a cable."""
    blocks = (path for mac in fabric.macs[:LAPTOP] for path in mac.home.rglob("*.full"))
    block = max(blocks, key=lambda path: path.stat().st_size)
    keys = keys_of(
        next(fabric.laptop.home.rglob(CLUSTER_KEY)).read_text(),
        next(fabric.head.home.rglob(MEMBER_KEY)).read_text(),
        next(fabric.head.home.rglob(RAY_TOKEN)).read_bytes(),
    )
    texts = {
        "the client's key": KEY.encode(),
        "the operator's key": OPERATOR_KEY.encode(),
        "the answer": code.encode(),
    }
    named = {"the agent's name, also in the prompt": agent.encode()}
    return keys | texts, named | parts_of(block.read_bytes())


def plant(fleet, fabric, mac, peer, host, text):
    """Send text in the clear from one Mac to another's address."""
    python = f"{ROOT}/.venv/bin/python"
    taker = fabric.macs[peer].exec([python, "-c", TAKE], stdout=-1, text=True)
    port = taker.stdout.readline().strip()
    done = fabric.macs[mac].run([python, "-c", PLANT, host, port, text.hex()])
    assert done.returncode == 0, done.stdout
    assert taker.wait(60) == 0


def test_traffic_of_a_fleet_reveals_no_secret():
    agent, code = word(), word()
    with (
        EmulatedFleet(macs=4, ethernet_mbit=1000, thunderbolt_mbit=10_000, cables=[CABLE]) as fleet,
        ExitStack() as stack,
    ):
        taps = {
            (mac, device): stack.enter_context(Capture(device, fleet.namespace(mac)))
            for mac in range(fleet.macs)
            for device in fleet.devices(mac)
        }
        fabric = RayUp(fleet)
        fabric.prepare()
        fabric.up()
        fabric.wait_nodes(len(NAMES))
        owner = NAMES.index(turn(fabric, agent, code))
        sent = []
        for target in (1, 0, 2, 1):  # over the cable both ways, then over Ethernet
            if target == owner:
                continue
            fabric.macfabric("migrate", agent, "--to", NAMES[target])
            sent.append({owner, target} == set(CABLE))
            assert turn(fabric, agent, code) == NAMES[target]
            owner = target
        assert {True, False} <= set(sent)
        always, moved = secret_texts(fabric, agent, code)
        planted = {what: b"planted: " + text for what, text in (always | moved).items()}
        for text in planted.values():
            plant(fleet, fabric, 0, 2, fleet.ethernet_host(2), text)
            plant(fleet, fabric, 0, 1, fleet.thunderbolt_host(1, 0), text)
        time.sleep(0.5)  # so that packets in transit are captured
    ethernet = {tap: seen for tap, seen in taps.items() if tap[1] == ETHERNET}
    cables = {tap: seen for tap, seen in taps.items() if tap[1] != ETHERNET}

    assert [tap for tap, seen in taps.items() if seen.lost] == []
    assert min(seen.packets for seen in ethernet.values()) > 100
    for seen in (taps[0, ETHERNET], taps[0, fleet.thunderbolt_device(0, 1)]):
        counts = {what: len(seen.find(text)) for what, text in planted.items()}
        assert counts == dict.fromkeys(planted, 1), "a planted text was not found"
    assert find_texts(ethernet, always | moved) == {}
    # `node.encrypt_links: auto` leaves a cable's payload in the clear, as documented.
    assert find_texts(cables, always) == {}


def find_texts(taps, wanted):
    """Return the texts of `wanted` found in captures, except where they were planted."""
    found = {
        (what, tap): [around for around in seen.find(text) if b"planted: " not in around]
        for what, text in wanted.items()
        for tap, seen in taps.items()
    }
    return {key: around[:3] for key, around in found.items() if around}
