"""A real `macfabric up` on stored agents with one late node: each owner serves its agents.

Clients send turns as soon as the router can be reached. The late node is stopped while it loads
(SIGSTOP) and continues when the other node has served for a while.
"""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.supervise.processes import ProcessId, descendants
from tests.cluster.ray_fabric import PAUSE_S, Agent, RayFabric, kill

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
START_S = 300.0
LATE_S = 0.5
LINES = 450
# These prompts take longer to compute than a node takes to load the bundled model.
OTHERS = 4
TAIL_TOKENS = 8  # of the last answer, which the next prompt may tokenize differently
NAMES = ("mira", "ivan", "nora", "emil", "vera", "otto")
LATE = "node-b"


@dataclass
class Answer:
    """Node of a first turn after the restart, and the tokens that it reused."""

    node: str
    epoch: int
    cached_tokens: int


@pytest.fixture
def fabric(tmp_path):
    ray_fabric = RayFabric(tmp_path, nodes=2)
    yield ray_fabric
    ray_fabric.close()


def add_agents(fabric):
    """Create agents with long histories until each node has one; return them with their tokens.

    Agents are not moved: a move leaves a copy, which would serve as well as the owner.
    """
    agents = {}
    for index, name in enumerate(NAMES):
        agent = Agent(name, f"otter{index} lantern quartz")
        notes = " ".join(f"The note {i} of {name} is about number {i * 7}." for i in range(LINES))
        text = f"The vault code of {name} is {agent.secret}. {notes}"
        fabric.post_chat(agent, text, 2, START_S)
        status, row = fabric.send("GET", f"/v1/agents/{name}")
        assert status == 200, row
        agents.setdefault(agent.node, (agent, row["tokens"]))
        if len(agents) == len(fabric.names):
            return agents
    return pytest.fail(f"all agents are on {list(agents)}")


def await_value(look):
    """Poll `look` until it returns a true value; return that."""
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


def is_busy(fabric, node):
    """Return whether a node computes prompts or has some queued."""
    row = {each["name"]: each for each in fabric.get("/v1/nodes")["data"]}[node]
    return row["active"] or row["waiting"] or row["queue_s"]


def ask_until_answered(fabric, owner, agent, answers):
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            _, cached = fabric.post_chat(agent, f"The vault code of {agent.name} is", 4, START_S)
        except (OSError, ValueError):
            time.sleep(PAUSE_S)
        else:
            answers[owner] = Answer(agent.node, agent.epoch, cached)
            return


def start_asking(fabric, agents):
    """Start a turn of every agent, retried until answered; return threads, and answers by owner."""
    answers: dict[str, Answer] = {}
    threads = [
        threading.Thread(target=ask_until_answered, args=(fabric, owner, agent, answers))
        for owner, (agent, _) in agents.items()
    ]
    for thread in threads:
        thread.start()
    return threads, answers


@contextlib.contextmanager
def other_clients(fabric):
    """Occupy the nodes that have joined with long prompts of new unnamed conversations."""
    with ThreadPoolExecutor(OTHERS) as pool:
        for number in range(OTHERS):
            text = " ".join(f"Line {i} of {number} is {i * number}." for i in range(LINES))
            messages = [{"role": "user", "content": text}]
            body = {"model": "recall", "messages": messages, "max_tokens": 1}
            pool.submit(fabric.send, "POST", "/v1/chat/completions", body, START_S)
        yield


def test_router_restarted_with_ray_head_waits_for_owners(fabric):
    """The head's own node restarts with it, and may take longer than recomputing would."""
    agents = add_agents(fabric)
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

    assert answers[LATE].node == LATE
    assert answers["node-a"].node == "node-a" or any("no owner joined" in line for line in log)
    for owner, (_, tokens) in agents.items():
        assert answers[owner].node != owner or answers[owner].cached_tokens >= tokens - TAIL_TOKENS


def test_first_turns_after_restart_use_the_owners_cache(fabric):
    agents = add_agents(fabric)
    fabric.close()
    fabric.launch()
    late = await_value(lambda: find_server(fabric, LATE))
    kill(late, signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        try:
            fabric.url = await_value(lambda: find_endpoint(fabric))
            await_value(lambda: is_serving_in_part(fabric))
            stack.enter_context(other_clients(fabric))
            await_value(lambda: is_busy(fabric, "node-a"))
            threads, answers = start_asking(fabric, agents)
            time.sleep(LATE_S)
            early = set(answers)
        finally:
            kill(late, signal.SIGCONT)
        for thread in threads:
            thread.join(START_S)
    fabric.await_start()
    log = (fabric.data / "logs" / "router.log").read_text().splitlines()
    print(*(line for line in log if " waited " in line), sep="\n")
    for owner, answer in answers.items():
        print(f"{owner}: knew {agents[owner][1]} tokens, then {answer}")

    assert LATE not in early
    assert {owner: answer.node for owner, answer in answers.items()} == {
        each: each for each in agents
    }
    for owner, (_, tokens) in agents.items():
        assert answers[owner].cached_tokens >= tokens - TAIL_TOKENS, owner
