"""A real `macfabric up` on stored agents, where one node is late: each owner serves its agents.

The clients ask from the moment at which the router can be reached. The late node is stopped while
it loads (SIGSTOP) and goes on when the other node has served for a while.
"""

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.supervise.processes import ProcessId, descendants
from tests.cluster.ray_fabric import PAUSE_S, Agent, RayFabric, kill

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
START_S = 300.0
LATE_S = 0.5
# So many tokens take longer to compute than a node takes to load the bundled model.
LINES = 450
NAMES = ("mira", "ivan")
LATE = "node-b"


@dataclass
class Answer:
    """Where a first turn after the restart was served, and what it reused."""

    node: str
    epoch: int
    cached_tokens: int


@pytest.fixture
def fabric(tmp_path):
    ray_fabric = RayFabric(tmp_path, nodes=2)
    yield ray_fabric
    ray_fabric.close()


def add_agents(fabric):
    """Make agents with long histories and one shared beginning, one on each node."""
    shared = " ".join(f"Rule {i} of this house is number {i * 3}." for i in range(40))
    agents = {}
    for index, name in enumerate(NAMES):
        agent = Agent(name, f"otter{index} lantern quartz")
        own = " ".join(f"The note {i} of {name} is about number {i * 7}." for i in range(LINES))
        fabric.post_chat(
            agent, f"{shared} The vault code of {name} is {agent.secret}. {own}", 2, START_S
        )
        _, cached = fabric.post_chat(agent, f"The vault code of {name} is", 4, START_S)
        owner = f"node-{'ab'[index % 2]}"
        if agent.node != owner:
            status, moved = fabric.send("POST", f"/v1/agents/{name}/migrate", {"to": owner})
            assert status == 200, moved
            agent.node, agent.epoch = owner, moved["epoch"]
        agents[name] = agent, cached
    return agents


def await_value(look):
    """Return what `look` finds, once it finds something."""
    end_s = time.monotonic() + START_S
    while not (found := look()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def find_endpoint(fabric):
    with contextlib.suppress(OSError, ValueError):
        return json.loads((fabric.data / "endpoint.json").read_text())["url"]
    return None


def find_server(fabric, node) -> ProcessId | None:
    """Return the process that has a node's folder open."""
    folder = f"{fabric.data / 'nodes' / node}{os.sep}"
    for process in descendants([fabric.popen.pid]):
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if f"{link.readlink()}{os.sep}".startswith(folder):
                        return process
    return None


def is_serving_in_part(fabric):
    with contextlib.suppress(OSError, ValueError):
        return fabric.get("/healthz")["status"] == "partial"
    return False


def ask_until_answered(fabric, agent, answers):
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            _, cached = fabric.post_chat(agent, f"The vault code of {agent.name} is", 4, START_S)
        except (OSError, ValueError):
            time.sleep(PAUSE_S)
        else:
            answers[agent.name] = Answer(agent.node, agent.epoch, cached)
            return


def start_asking(fabric, agents):
    """Let every agent be asked until it is answered; return the threads and the answers."""
    answers: dict[str, Answer] = {}
    threads = [
        threading.Thread(target=ask_until_answered, args=(fabric, agent, answers))
        for agent, _ in agents.values()
    ]
    for thread in threads:
        thread.start()
    return threads, answers


def test_router_restarted_with_ray_head_waits_for_owners(fabric):
    """The head's own node goes with it, and may be later than computing anew would take."""
    agents = add_agents(fabric)
    owners = {name: agent.node for name, (agent, _) in agents.items()}
    before = fabric.incarnation("node-a")
    head, router = fabric.head(), fabric.router()
    kill(head)
    kill(router)
    threads, answers = start_asking(fabric, agents)
    for thread in threads:
        thread.join(START_S)
    fabric.await_return("node-a", before, START_S)
    log = (fabric.data / "logs" / "router.log").read_text().splitlines()
    print(*(line for line in log if " waited " in line), sep="\n")
    print(answers)

    assert answers["ivan"].node == owners["ivan"] == LATE
    assert answers["mira"].node == "node-a" or any("no owner joined" in line for line in log)
    for name, (_, cached) in agents.items():
        assert answers[name].node != owners[name] or answers[name].cached_tokens >= cached


def test_first_turns_after_restart_use_the_owners_cache(fabric):
    agents = add_agents(fabric)
    owners = {name: agent.node for name, (agent, _) in agents.items()}
    fabric.close()
    fabric.launch()
    late = await_value(lambda: find_server(fabric, LATE))
    kill(late, signal.SIGSTOP)
    try:
        fabric.url = await_value(lambda: find_endpoint(fabric))
        threads, answers = start_asking(fabric, agents)
        await_value(lambda: is_serving_in_part(fabric))
        time.sleep(LATE_S)
        early = set(answers)
    finally:
        kill(late, signal.SIGCONT)
    for thread in threads:
        thread.join(START_S)
    fabric.await_start()
    log = (fabric.data / "logs" / "router.log").read_text().splitlines()
    print(*(line for line in log if " waited " in line), sep="\n")
    for name, answer in answers.items():
        print(f"{name}: owner {owners[name]}, knew {agents[name][1]} tokens, then {answer}")

    assert not any(owners[name] == LATE for name in early)
    assert {name: answer.node for name, answer in answers.items()} == owners
    for name, (_, cached) in agents.items():
        assert answers[name].cached_tokens >= cached, name
