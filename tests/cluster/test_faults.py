"""Parts of a real fabric die, hang and return: agents keep their memory and have one owner.

Times are printed and not asserted; ARCHITECTURE.md explains them.
"""

import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabric.record.manifest import OwnerState
from router.supervise.processes import descendants, wait_for_exit
from tests.cluster.ray_fabric import Agent, RayFabric, command, kill
from tests.support.samples import sample

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="finds Ray's processes in /proc"
    ),
]
SECRETS = (
    "otter lantern quartz violin",
    "amber falcon copper meadow",
    "silver maple thunder ivory",
)
AGENTS_PER_NODE = 2
FROZEN_S = 20.0
GONE_S = 20.0
AWAY_S = 75.0  # Ray waits 60 for its head
LONG_TOKENS = 3_000
NEW_AGENTS = 200
NODE_SHARE_MAX = 0.4  # of all new agents on three equal nodes
FASTER_PART = 1.25  # of a node's share of all measured speeds
REJOIN_S = 15.0  # the router looks up its own Ray node periodically
HANG_S = 30.0  # much longer than one answer takes on a busy machine


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    ray_fabric = RayFabric(tmp_path_factory.mktemp("faults"))
    try:
        for index, node in enumerate(ray_fabric.names):
            for number in range(AGENTS_PER_NODE):
                agent = ray_fabric.add_agent(f"Mira{index}{number}", SECRETS[index])
                if agent.node != node:
                    status, _ = ray_fabric.send(
                        "POST", f"/v1/agents/{agent.name}/migrate", {"to": node}
                    )
                    assert status == 200
                ray_fabric.await_recall(agent)
        yield ray_fabric
    finally:
        ray_fabric.close()


@pytest.fixture
def agents_on(fabric):
    """Return the agents of a node, which gets some if it has none."""
    fabric.await_ready()

    def agents(node):
        for _ in range(len(fabric.agents)):
            found = [agent for agent in fabric.agents if agent.node == node]
            if len(found) >= AGENTS_PER_NODE:
                return found
            counts = Counter(agent.node for agent in fabric.agents)
            # Take it from a node with surplus agents: the caller may rely on the others.
            extra = next(agent for agent in fabric.agents if counts[agent.node] > AGENTS_PER_NODE)
            fabric.send("POST", f"/v1/agents/{extra.name}/migrate", {"to": node})
            fabric.await_recall(extra)
        return pytest.fail(f"{node} has no {AGENTS_PER_NODE} agents: {fabric.agents}")

    return agents


@pytest.mark.nightly
def test_new_agents_spread_over_the_nodes(fabric, agents_on):
    agents_on("node-a")

    def begin(name):
        agent = Agent(name, "")
        fabric.post_chat(agent, f"I am {name}.", 2)
        return agent.node

    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(begin, [f"new-{i}" for i in range(NEW_AGENTS)]))
    singly = [begin(f"newer-{i}") for i in range(NEW_AGENTS // 4)]
    print(f"\nnew agents: {Counter(together)} at once, {Counter(singly)} one by one")

    rows = fabric.get("/v1/nodes")["data"]
    rates = {row["name"]: row["prefill_tokens_per_s"] for row in rows}
    for nodes in (together, together + singly):
        for node, count in Counter(nodes).items():
            # Three nodes that share a busy machine's cores measure different speeds.
            part = max(NODE_SHARE_MAX, FASTER_PART * rates[node] / sum(rates.values()))
            assert count <= part * len(nodes)
    for kind, count in (("new", NEW_AGENTS), ("newer", NEW_AGENTS // 4)):
        for i in range(count):
            assert fabric.send("DELETE", f"/v1/agents/{kind}-{i}")[0] == 200


def test_killed_node_is_replaced_and_agents_keep_their_memory(fabric, agents_on):
    elsewhere = [agents_on("node-a")[0], agents_on("node-c")[0]]
    touched, untouched, *_ = agents_on("node-b")
    before, epoch = fabric.incarnation("node-b"), untouched.epoch
    with fabric.watched(elsewhere) as watch:
        kill(fabric.actor("node-b"))
        seconds = fabric.await_recall(touched)
        back_s = fabric.await_return("node-b", before)
    answer, cached = fabric.post_chat(untouched, f"The vault code of {untouched.name} is")
    print(
        f"\na node killed: answered by {touched.node} after {seconds:.1f} s, back in {back_s:.1f} s"
    )

    assert watch.failures == [], "turns of other agents failed"
    assert watch.turns >= 2
    assert untouched.secret in answer
    assert cached > 100, "what was acknowledged is on its disk"
    assert (untouched.node, untouched.epoch) == ("node-b", epoch)
    fabric.check_all()


@pytest.mark.nightly
def test_frozen_node_returns_without_ownership(fabric, agents_on):
    agent, *_ = agents_on("node-c")
    old_epoch, late = agent.epoch, []
    processes = [fabric.actor("node-c"), fabric.raylet("node-c")]

    def long_turn():
        body = {"model": "recall", "max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}
        messages = [*agent.history, {"role": "user", "content": "Go on and on."}]
        late.append(fabric.ask(agent.name, body | {"messages": messages}))

    turn = threading.Thread(target=long_turn)
    turn.start()
    while not fabric.active("node-c"):
        time.sleep(0.02)
    for process in processes:
        kill(process, signal.SIGSTOP)
    frozen_s = time.monotonic()
    try:
        seconds = fabric.await_recall(agent)
        new_owner = (agent.node, agent.epoch)
        time.sleep(max(0.0, FROZEN_S - (time.monotonic() - frozen_s)))
    finally:
        for process in processes:
            kill(process, signal.SIGCONT)
    turn.join(60)
    record = fabric.await_one_owner(agent)
    print(f"\na node frozen: answered by {new_owner[0]} after {seconds:.1f} s")

    assert late[0][0] == 503, "its turn was not acknowledged"
    assert new_owner[0] != "node-c"
    assert (record.owner, record.epoch) == new_owner
    assert record.epoch > old_epoch
    assert fabric.records(agent)["node-c"].state is OwnerState.REPLICA
    assert fabric.metric("macfabric_takeovers_total") >= 1
    fabric.await_ready()
    fabric.check_all()


def test_restarted_router_finds_its_agents(fabric, agents_on):
    agents_on("node-a")
    before = {agent.name: (agent.node, agent.epoch) for agent in fabric.agents}
    stop, acknowledged = threading.Event(), []

    def talk(agent):
        while not stop.is_set():
            try:
                fabric.post_chat(agent, f"The vault code of {agent.name} is", 4)
                acknowledged.append(agent.name)
            except OSError:
                time.sleep(0.1)

    threads = [threading.Thread(target=talk, args=(agent,)) for agent in fabric.agents[:3]]
    for thread in threads:
        thread.start()
    while len(acknowledged) < 3:
        time.sleep(0.02)
    kill(fabric.router())
    count, began_s = len(acknowledged), time.monotonic()
    while len(acknowledged) < count + 3 and time.monotonic() - began_s < 90:
        time.sleep(0.02)
    seconds = time.monotonic() - began_s
    stop.set()
    for thread in threads:
        thread.join(90)
    print(f"\nthe router killed: three turns were answered within {seconds:.1f} s")

    assert len(acknowledged) >= count + 3
    fabric.await_ready()
    fabric.check_all()
    after = {agent.name: (agent.node, agent.epoch) for agent in fabric.agents}
    assert after == before, "no owner was lost, so none was replaced"


@pytest.mark.parametrize("is_frozen", sample([False, True], False))
def test_erasure_right_after_router_restart_succeeds(fabric, agents_on, is_frozen):
    """Clients treat 404 as erased: it must not be returned before the owner could be queried."""
    agents_on("node-b")
    name = f"erin-{is_frozen}-canary@example.com"
    agent = fabric.add_agent(name, SECRETS[0])
    fabric.agents.remove(agent)
    assert fabric.records(agent)
    owner = fabric.actor(agent.node)
    if is_frozen:
        kill(owner, signal.SIGSTOP)
    kill(fabric.router())
    began_s = time.monotonic()
    try:
        status, receipt = None, {}
        while status in (None, 503) and time.monotonic() - began_s < 90:
            try:
                status, receipt = fabric.send("DELETE", f"/v1/agents/{agent.name}")
            except OSError:
                time.sleep(0.02)
    finally:
        kill(owner, signal.SIGCONT)
    print(f"\nerased {time.monotonic() - began_s:.1f} s after the router's death")

    assert status == 200
    assert receipt["deleted"] is not is_frozen
    assert receipt["unreachable"] == ([agent.node] if is_frozen else [])
    fabric.await_ready()
    deadline_s = time.monotonic() + 60
    while fabric.records(agent):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert fabric.send("GET", f"/v1/agents/{agent.name}")[0] == 404
    logs = [path for path in fabric.data.rglob("logs/**/*") if path.is_file()]
    assert any(path.name == "router.log" for path in logs)
    for path in (*logs, fabric.log):
        raw = path.read_bytes()
        assert name.encode() not in raw, path
        assert SECRETS[0].encode() not in raw, path
    fabric.check_all()


@pytest.mark.nightly
def test_node_of_a_killed_raylet_is_replaced(fabric, agents_on):
    agent, *_ = agents_on("node-b")
    before, process = fabric.incarnation("node-b"), fabric.actor("node-b")
    kill(fabric.raylet("node-b"))
    assert wait_for_exit([process], GONE_S) == []
    seconds = fabric.await_recall(agent)
    back_s = fabric.await_return("node-b", before)
    print(
        f"\na raylet killed: answered by {agent.node} after {seconds:.1f} s, back in {back_s:.1f} s"
    )

    fabric.check_all()


@pytest.mark.nightly
def test_nodes_keep_serving_without_ray_head(fabric, agents_on):
    elsewhere, on_head = agents_on("node-b")[0], agents_on("node-a")[0]
    before, process = fabric.incarnation("node-a"), fabric.actor("node-a")
    others = {name: fabric.actor(name) for name in ("node-b", "node-c")}
    with fabric.watched([elsewhere, agents_on("node-c")[0]]) as watch:
        kill(fabric.head())
        began_s = time.monotonic()
        assert wait_for_exit([process], GONE_S) == [], "the head's own node is lost with it"
        fabric.await_recall(on_head)
        here_s = time.monotonic() - began_s
        back_s = fabric.await_return("node-a", before, 180)
        fabric.await_ready()
    print(
        f"\nRay's head killed: {watch.turns} turns elsewhere, the longest {watch.longest_s:.1f} s, "
        f"its own agent answered after {here_s:.1f} s, back in {back_s:.1f} s; the router's "
        f"longest silence {watch.standstill_s:.1f} s"
    )

    assert watch.failures == []
    assert watch.turns >= 2
    assert watch.standstill_s < HANG_S
    fabric.check_all()
    assert {name: fabric.actor(name) for name in others} == others, "the other nodes kept running"


@pytest.mark.nightly
def test_nodes_and_router_outlive_ray_head_that_is_away_for_over_a_minute(fabric, agents_on):
    """Ray itself waits a minute, in which a busy machine may not have restarted its head."""
    elsewhere = [agents_on("node-b")[0], agents_on("node-c")[0]]
    before, router = fabric.incarnation("node-a"), fabric.router()
    others = {name: fabric.actor(name) for name in ("node-b", "node-c")}
    fabric.popen.send_signal(signal.SIGSTOP)  # the supervisor would restart the head at once
    try:
        with fabric.watched(elsewhere) as watch:
            kill(fabric.head())
            time.sleep(AWAY_S)
    finally:
        fabric.popen.send_signal(signal.SIGCONT)
    print(f"\nRay's head away for {AWAY_S:.0f} s: {watch.turns} turns elsewhere")

    assert fabric.router() == router
    assert watch.failures == []
    assert watch.turns >= 2
    fabric.await_return("node-a", before, 180)
    fabric.await_ready()
    assert {name: fabric.actor(name) for name in others} == others, "the other nodes kept running"
    fabric.check_all()


@pytest.mark.nightly
def test_router_keeps_serving_while_head_raylet_is_replaced(fabric, agents_on):
    """The router, too, is a client of that raylet, and must find its successor."""
    elsewhere, on_head = [agents_on("node-b")[0], agents_on("node-c")[0]], agents_on("node-a")[0]
    before, router = fabric.incarnation("node-a"), fabric.router()
    with fabric.watched(elsewhere) as watch:
        kill(fabric.raylet("node-a"))
        here_s = fabric.await_recall(on_head)
        back_s = fabric.await_return("node-a", before, 180)
        fabric.await_ready()
        time.sleep(REJOIN_S)
        owned = [command(process) for process in descendants([router.pid])]
    print(
        f"\nthe head's raylet killed: its own agent answered after {here_s:.1f} s, back in "
        f"{back_s:.1f} s, {watch.turns} turns elsewhere, the longest {watch.longest_s:.1f} s; "
        f"the router's longest silence {watch.standstill_s:.1f} s"
    )

    assert fabric.router() == router
    assert owned == [], "it starts no Ray of its own"
    assert watch.failures == []
    assert watch.turns >= 2
    assert watch.standstill_s < HANG_S
    assert watch.longest_s < HANG_S
    fabric.check_all()


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["source", "target", "router"])
def test_kill_during_migration_leaves_one_owner(fabric, agents_on, victim):
    chance = random.Random(victim)
    for _ in range(4):
        agent = agents_on("node-b")[0]
        moving = threading.Thread(
            target=fabric.send_ignoring_errors,
            args=("POST", f"/v1/agents/{agent.name}/migrate", {"to": "node-c"}),
        )
        names = {"source": "node-b", "target": "node-c"}
        before = fabric.incarnation(names.get(victim, "node-a"))
        process = fabric.router() if victim == "router" else fabric.actor(names[victim])
        moving.start()
        time.sleep(chance.uniform(0.0, 0.15))
        kill(process)
        moving.join(90)
        seconds = fabric.await_recall(agent)
        print(f"\nthe {victim} killed in a move: {agent.node} answered after {seconds:.1f} s")
        if victim != "router":
            fabric.await_return(names[victim], before)
        fabric.await_ready()
        fabric.check_all()
