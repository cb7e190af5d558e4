"""Every verb of an agent whose node was just killed: served, or refused with a retry time.

The table names every route with an agent in its path, so that a new verb fails until it is listed.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from router.app import described
from router.fleet.membership import LeaseState
from tests.support.process_fabric import ProcessFabric, process_fabric

DEADLINE_S = 60.0
FACT = "The code of the vault is otter lantern quartz."
SEEN = {200, 201}

BASE = "/v1/agents/{agent}"
DIRECTIVE = {"directives": [{"message": 0, "replacement": "The code is not for you."}]}
EARLIER = {"earlier": {"message": 0}, "later": {"message": 2}}
# What each verb is sent, and what it answers once a replica has taken over.
VERBS = {
    ("post", f"{BASE}/directives"): (DIRECTIVE, SEEN),
    ("get", f"{BASE}/directives"): (None, SEEN),
    ("delete", f"{BASE}/directives"): (None, SEEN),
    ("delete", f"{BASE}/directives/{{operation}}"): (None, SEEN),
    ("post", f"{BASE}/rebuild"): ({}, SEEN),
    ("post", f"{BASE}/fork"): ({"as": "{agent}-fork"}, SEEN),
    ("post", f"{BASE}/pin"): ({"pinned": True}, SEEN),
    ("post", f"{BASE}/share"): ({"scope": "agent"}, SEEN),
    ("post", f"{BASE}/decay"): ({"after_s": 60}, SEEN),
    ("delete", f"{BASE}/decay"): (None, SEEN),
    ("post", f"{BASE}/close"): ({}, SEEN),
    ("post", f"{BASE}/evict"): ({}, SEEN),
    ("post", f"{BASE}/supersede"): (EARLIER, SEEN),
    ("post", f"{BASE}/hibernate"): ({}, SEEN),
    ("post", f"{BASE}/migrate"): ({"to": "{other}"}, SEEN),
    ("post", f"{BASE}/replicate"): ({"to": "{other}"}, SEEN),
    ("post", f"{BASE}/prefetch"): ({}, SEEN),
    ("delete", f"{BASE}/prefetch"): (None, SEEN),
    ("post", f"{BASE}/generate"): ({"text": " The code of the vault is", "max_tokens": 4}, SEEN),
    ("post", f"{BASE}/resume"): (None, {400}),  # without a file: no node is called
    ("get", BASE): (None, SEEN),
    ("get", f"{BASE}/turns"): (None, SEEN),
    ("delete", BASE): (None, SEEN),
}
KINDS = ("first", "alone", "copied")
OWNERLESS = {("get", BASE), ("delete", BASE), ("post", f"{BASE}/resume")}


def spelled(verb):
    method, path = verb
    return f"{method}-{path.removeprefix(BASE).strip('/').replace('/', '-') or 'agent'}"


def names_of(kind):
    """Return an agent for every verb, so that no verb affects the agent of another."""
    return {verb: f"{kind}-{number}" for number, verb in enumerate(VERBS)}


def send(fabric, verb, agent, other):
    (method, path), (body, _) = verb, VERBS[verb]
    url = path.format(agent=agent, operation="unknown-operation")
    if body is None:
        return fabric.http.request(method, url)
    text = json.dumps(body).replace("{agent}", agent).replace("{other}", other)
    return fabric.http.request(method, url, json=json.loads(text))


def check_refusal(answer, agent):
    """Check that a 503 names the agent and its lost node, and says when to try again."""
    assert int(answer.headers["retry-after"]) >= 1
    message = answer.json()["error"]["message"]
    assert agent in message, message
    assert "mac-b" in message, message


def settled(fabric, verb, agent, other="mac-c"):
    """Repeat a verb while it is refused for now; return the last answer."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        answer = send(fabric, verb, agent, other)
        if answer.status_code != 503:
            return answer
        check_refusal(answer, agent)
        if time.monotonic() >= until_s or answer.json()["error"]["code"] == "owner_lost":
            return answer
        time.sleep(0.2)


def messages(*, more=()):
    return [
        {"role": "user", "content": FACT},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "The code of the vault is"},
        *more,
    ]


def test_verb_table_lists_every_agent_route():
    routes = {
        (method, path)
        for path, methods in described()["paths"].items()
        for method in methods
        if "{agent}" in path
    }
    assert routes == set(VERBS)


@dataclass(frozen=True)
class OwnerLoss:
    """A fabric whose mac-b is dead, and the answer to every verb before its lease expired."""

    fabric: ProcessFabric
    at_once: dict


@pytest.fixture(scope="module")
def loss(tmp_path_factory):
    """Make agents on mac-b, some of them with a replica on mac-a, and kill mac-b.

    Every verb is sent once at that moment; the other cases begin when the lease has run out.
    """
    folder = tmp_path_factory.mktemp("lost")
    with process_fabric(folder, "recall", "mac-a", "mac-b", "mac-c") as fabric:
        fabric.await_agents()
        home = fabric.chat(messages(), agent="first", max_tokens=4)
        if home.node != "mac-b":
            fabric.migrate("first", "mac-b")
        agents = [name for kind in KINDS for name in names_of(kind).values()]
        for agent in agents:
            answer = fabric.http.post("/v1/agents/first/fork", json={"as": agent, "to": "mac-b"})
            assert answer.status_code == 200, answer.text
        for agent in names_of("copied").values():
            body = {"to": "mac-a", "keep": False}
            answer = fabric.http.post(f"/v1/agents/{agent}/replicate", json=body)
            assert answer.status_code == 200, answer.text
        fabric.kill("mac-b")
        first = names_of("first")
        with ThreadPoolExecutor(len(first)) as threads:
            answers = threads.map(lambda item: send(fabric, *item, "mac-c"), first.items())
            at_once = dict(zip(first, answers, strict=True))
        until_s = time.monotonic() + DEADLINE_S
        while lease_of(fabric, "mac-b") != LeaseState.EXPIRED:
            assert time.monotonic() < until_s
            time.sleep(0.1)
        yield OwnerLoss(fabric, at_once)


@pytest.fixture
def fabric_after_loss(loss):
    return loss.fabric


def lease_of(fabric, name):
    nodes = fabric.http.get("/v1/nodes").json()["data"]
    return next(node["state"] for node in nodes if node["name"] == name)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS, ids=spelled)
def test_refusal_at_node_loss_names_the_agent_and_its_node(loss, verb):
    answer = loss.at_once[verb]
    if answer.status_code == 503:
        check_refusal(answer, names_of("first")[verb])
    else:
        assert answer.status_code in VERBS[verb][1], answer.text


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS, ids=spelled)
def test_verb_is_served_by_the_replica(fabric_after_loss, verb):
    agent = names_of("copied")[verb]
    answer = settled(fabric_after_loss, verb, agent)
    assert answer.status_code in VERBS[verb][1], answer.text
    if verb in OWNERLESS or verb == ("post", f"{BASE}/generate"):
        return
    shown = fabric_after_loss.http.get(f"/v1/agents/{agent}").json()
    moved = verb == ("post", f"{BASE}/migrate")
    assert shown["owner"] == ("mac-c" if moved else "mac-a")
    assert shown["tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS, ids=spelled)
def test_verb_without_a_replica_waits_for_the_next_turn(fabric_after_loss, verb):
    agent = names_of("alone")[verb]
    answer = settled(fabric_after_loss, verb, agent)
    if verb in OWNERLESS:
        assert answer.status_code in VERBS[verb][1], answer.text
        return
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "owner_lost")
    turn = fabric_after_loss.chat(messages(), agent=agent, max_tokens=4)
    assert turn.node != "mac-b"
    other = next(name for name in ("mac-a", "mac-c") if name != turn.node)
    answer = settled(fabric_after_loss, verb, agent, other)
    assert answer.status_code in VERBS[verb][1], answer.text
