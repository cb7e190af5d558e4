"""`ray up` on three emulated Macs, from a fourth one, with the shipped cluster.yaml.

Differences from that file are in ray_up.py: the reader's edits, and the install commands, because
no package index can be reached.
"""

import json
import subprocess
import time

import pytest
import yaml

from benchmarks.emulated_fleet import EmulatedFleet
from benchmarks.emulated_mac import HOME, ROOT, missing_requirement
from tests.fleet.ray_up import DRIVER, KEY, NAMES, RayUp, client_argv, edited

pytestmark = [
    pytest.mark.nightly,  # ten minutes on two cores, most of them Ray's starts
    pytest.mark.privileged,
    pytest.mark.slow,
    pytest.mark.skipif(
        missing_requirement() is not None, reason=f"no emulated Macs: {missing_requirement()}"
    ),
]
TURN_TIMEOUT_S = 120.0
BACK_TIMEOUT_S = 300.0

CODE = "otter lantern quartz"
COUNT_RAY_NODES = """
import ray
ray.init(address="auto", logging_level="error")
print(sum(row["Alive"] for row in ray.nodes()))
"""


@pytest.fixture(scope="module")
def fabric():
    cables = [(0, 1), (0, 2), (1, 2)]  # not to the laptop
    with EmulatedFleet(macs=4, ethernet_mbit=1000, thunderbolt_mbit=10_000, cables=cables) as fleet:
        ray_up = RayUp(fleet)
        ray_up.prepare()
        check = [f"{ROOT}/.venv/bin/python", "-m", "router.cli.main", "config", "check"]
        assert "is fine" in ray_up.on_laptop(*check, f"{HOME}/cluster.yaml")
        ray_up.up()
        ray_up.wait_nodes(len(NAMES))
        yield ray_up


def turn(fabric, agent="mira"):
    done = fabric.on_laptop(*client(fabric, agent), timeout_s=TURN_TIMEOUT_S)
    reply = json.loads(done.splitlines()[-1])
    assert CODE in reply["text"]
    return reply


def client(fabric, agent, *until, key=KEY):
    return client_argv(fabric.url, key, agent, CODE, *until)


def lives(nodes):
    """Return the pid and incarnation of every node."""
    return {node["name"]: (node["pid"], node["incarnation"]) for node in nodes}


def test_edited_file_differs_from_shipped_file_only_as_documented():
    shipped = (ROOT / "cluster.yaml").read_text()
    before = yaml.safe_load(shipped)
    after = yaml.safe_load(edited(shipped, "10.0.0.1", ["10.0.0.2", "10.0.0.3"]))
    for config in (before, after):
        del config["provider"]["head_ip"], config["provider"]["worker_ips"]
        del config["setup_commands"]
        del config["metadata"]["macfabric"]["router"]["host"]
    for keys in ("api_keys", "operator_keys"):
        del after["metadata"]["macfabric"]["router"][keys]

    assert after == before


def test_up_starts_the_router_and_a_node_on_every_mac(fabric):
    nodes = fabric.wait_nodes(len(NAMES))

    assert {node["name"]: node["host"] for node in nodes} == {
        mac.name: mac.host for mac in fabric.macs[:-1]
    }
    count = [f"{HOME}/macfabric/venv/bin/python", "-P", "-c", COUNT_RAY_NODES]
    done = fabric.head.run(count, 60, env=DRIVER)
    assert done.stdout.split()[-1] == str(len(NAMES)), done.stdout


def test_macs_run_the_copied_code(fabric):
    where = "import node, router; print(node.__file__, router.__file__)"
    argv = [f"{HOME}/macfabric/venv/bin/python", "-P", "-c", where]
    for mac in fabric.macs[:-1]:
        found = mac.run(argv, env={"PYTHONPATH": ""}).stdout.split()
        assert all(path.startswith(f"{HOME}/macfabric/app/") for path in found), found


def test_client_without_key_is_rejected(fabric):
    refused = fabric.laptop.run(client(fabric, "mira", key="a-key-that-is-not-configured"))
    assert refused.returncode != 0
    assert "401" in refused.stdout


def test_agent_migrates_over_the_fast_link(fabric):
    first = turn(fabric)
    assert first["cache"] == "cold"
    source = NAMES.index(first["node"])
    target = (source + 1) % len(NAMES)
    fast = fabric.fleet.thunderbolt_device(source, target)
    devices = fabric.fleet.devices(source)

    before = {device: fabric.fleet.sent_bytes(source, device) for device in devices}
    moved = fabric.macfabric("migrate", "mira", "--to", NAMES[target])
    sent = {device: fabric.fleet.sent_bytes(source, device) - before[device] for device in devices}

    assert (moved["from"], moved["to"], moved["epoch"]) == (first["node"], NAMES[target], 2)
    assert moved["bytes_sent"] > 1_000_000
    # The constructed model's blocks compress well, so fewer bytes leave than the agent has: the
    # fewer, the busier this machine is.
    assert 30_000 < sent[fast] <= 1.1 * moved["bytes_sent"]
    assert sent[fast] > sum(sent.values()) / 2  # the rest: heartbeats, Ray, the slower link's part
    after = turn(fabric)
    assert (after["node"], after["cache"], after["epoch"]) == (NAMES[target], "peer", "2")
    assert int(after["cached-tokens"]) > 1000


def test_repeated_up_interrupts_no_turn(fabric):
    before = lives(fabric.wait_nodes(len(NAMES)))
    agent = fabric.macfabric("agent", "mira")
    turns = fabric.laptop.exec(
        client(fabric, "mira", "/tmp/enough"), stdout=subprocess.PIPE, text=True
    )
    assert CODE in turns.stdout.readline()
    fabric.up()
    fabric.on_laptop("touch", "/tmp/enough")
    replies = [
        json.loads(line) for line in turns.communicate(timeout=TURN_TIMEOUT_S)[0].splitlines()
    ]

    assert turns.returncode == 0
    assert len(replies) > 1
    assert all(CODE in turn["text"] and turn["cache"] == "hot" for turn in replies)
    assert lives(fabric.wait_nodes(len(NAMES))) == before
    assert fabric.macfabric("agent", "mira")["epoch"] == agent["epoch"]


FAULTS = {
    "it hangs": (lambda f, v: v.freeze(), lambda f, v: v.thaw()),
    "it cannot speak to the head": (
        lambda f, v: f.fleet.block(v.index, 0),
        lambda f, v: f.fleet.unblock(v.index, 0),
    ),
    "the head cannot speak to it": (
        lambda f, v: f.fleet.block(0, v.index),
        lambda f, v: f.fleet.unblock(0, v.index),
    ),
    "its cables are pulled": (
        lambda f, v: [f.fleet.cut(v.index, device) for device in f.fleet.devices(v.index)],
        lambda f, v: [f.fleet.restore(v.index, device) for device in f.fleet.devices(v.index)],
    ),
    "its power fails": (lambda f, v: v.kill(), lambda f, v: v.start()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_agent_of_a_lost_mac_answers_elsewhere_with_one_owner(fabric, fault):
    begin, end = FAULTS[fault]
    victim = fabric.macs[2]  # a worker
    if fabric.macfabric("agent", "mira")["owner"] != victim.name:
        fabric.macfabric("migrate", "mira", "--to", victim.name)
    assert turn(fabric)["node"] == victim.name
    epoch = fabric.macfabric("agent", "mira")["epoch"]
    before = lives(fabric.wait_nodes(len(NAMES)))

    begin(fabric, victim)
    try:
        elsewhere = retried_turn(fabric)
    finally:
        end(fabric, victim)
    assert elsewhere["node"] != victim.name
    assert int(elsewhere["epoch"]) > epoch

    after = lives(fabric.wait_nodes(len(NAMES), BACK_TIMEOUT_S))
    others = {name: life for name, life in before.items() if name != victim.name}
    assert {name: after[name] for name in others} == others
    if fault == "its power fails":
        assert after[victim.name][1] > before[victim.name][1]
    # The victim's ownership is superseded: the node that answered owns the agent.
    assert turn(fabric)["node"] == elsewhere["node"]
    owners = [row["owner"] for row in fabric.macfabric("agents") if row["id"] == "mira"]
    assert owners == [elsewhere["node"]]


def retried_turn(fabric):
    """Retry a turn, as a client does, while its agent's node is being declared lost."""
    deadline_s = time.monotonic() + TURN_TIMEOUT_S
    while True:
        done = fabric.laptop.run(client(fabric, "mira"), TURN_TIMEOUT_S)
        if done.returncode == 0:
            reply = json.loads(done.stdout.splitlines()[-1])
            assert CODE in reply["text"]
            return reply
        assert time.monotonic() < deadline_s, done.stdout


def test_up_with_changed_settings_restarts_nodes_and_keeps_agents(fabric):
    before = lives(fabric.wait_nodes(len(NAMES)))
    path = fabric.laptop.home / "cluster.yaml"
    text = path.read_text()
    assert text.count("hot_bytes: auto") == 1
    fabric.laptop.write("cluster.yaml", text.replace("hot_bytes: auto", "hot_bytes: 4GiB"))

    fabric.up()
    deadline_s = time.monotonic() + BACK_TIMEOUT_S
    while any(
        now[1] <= before[name][1]
        for name, now in lives(fabric.wait_nodes(len(NAMES), BACK_TIMEOUT_S)).items()
    ):
        assert time.monotonic() < deadline_s, fabric.logs()
        time.sleep(1)
    reply = turn(fabric)
    assert reply["cache"] == "disk"
    assert int(reply["cached-tokens"]) > 1000


def test_down_stops_every_process(fabric):
    down = [f"{ROOT}/.venv/bin/python", "-m", "router.cli.main", "down", "--json"]
    output = fabric.on_laptop(*down, "--config", f"{HOME}/cluster.yaml", timeout_s=200)
    rows = json.loads(output[output.index("{\n") :])["macs"]  # after the progress on standard error

    assert [(row["host"], row["ok"]) for row in rows] == [
        (mac.host, True) for mac in fabric.macs[:-1]
    ]
    for mac in fabric.macs[:-1]:
        deadline_s = time.monotonic() + TURN_TIMEOUT_S  # ssh keeps connections open for a while
        while others := set(mac.run(["ps", "-A", "-o", "comm="]).stdout.split()) - {"sshd", "ps"}:
            assert time.monotonic() < deadline_s, others
            time.sleep(1)

    fabric.macs[1].kill()
    again = fabric.laptop.run([*down, "--config", f"{HOME}/cluster.yaml"], 200)
    rows = json.loads(again.stdout)["macs"]
    assert again.returncode == 1
    assert [row["ok"] for row in rows] == [True, False, True], rows
