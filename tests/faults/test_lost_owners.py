"""Every verb on an agent whose node was just killed is served or refused with a retry time.

The table names every route with an agent in its path, so that a new verb fails until it is listed.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from router.app import describe_api
from router.fleet.membership import LeaseState
from tests.support.process_fabric import ProcessFabric, process_fabric

DEADLINE_S = 60.0
FACT = "The code of the vault is otter lantern quartz."
SERVED = {200, 201}

BASE = "/v1/agents/{agent}"
DIRECTIVE = {"directives": [{"message": 0, "replacement": "The code is not for you."}]}
EARLIER = {"earlier": {"message": 0}, "later": {"message": 2}}
# Body of each verb, and its statuses after a replica has taken over.
VERBS = {
    ("post", f"{BASE}/directives"): (DIRECTIVE, SERVED),
    ("get", f"{BASE}/directives"): (None, SERVED),
    ("delete", f"{BASE}/directives"): (None, SERVED),
    ("delete", f"{BASE}/directives/{{operation}}"): (None, SERVED),
    ("post", f"{BASE}/rebuild"): ({}, SERVED),
    ("post", f"{BASE}/fork"): ({"as": "{agent}-fork"}, SERVED),
    ("post", f"{BASE}/pin"): ({"pinned": True}, SERVED),
    ("post", f"{BASE}/share"): ({"scope": "agent"}, SERVED),
    ("post", f"{BASE}/decay"): ({"after_s": 60}, SERVED),
    ("delete", f"{BASE}/decay"): (None, SERVED),
    ("post", f"{BASE}/close"): ({}, SERVED),
    ("post", f"{BASE}/evict"): ({}, SERVED),
    ("post", f"{BASE}/supersede"): (EARLIER, SERVED),
    ("post", f"{BASE}/hibernate"): ({}, SERVED),
    ("post", f"{BASE}/migrate"): ({"to": "{other}"}, SERVED),
    ("post", f"{BASE}/replicate"): ({"to": "{other}"}, SERVED),
    ("post", f"{BASE}/prefetch"): ({}, SERVED),
    ("delete", f"{BASE}/prefetch"): (None, SERVED),
    ("post", f"{BASE}/generate"): ({"text": " The code of the vault is", "max_tokens": 4}, SERVED),
    ("post", f"{BASE}/resume"): (None, {400}),  # without a file, no node is called
    ("get", BASE): (None, SERVED),
    ("get", f"{BASE}/turns"): (None, SERVED),
    ("delete", BASE): (None, SERVED),
}
KINDS = ("first", "alone", "copied")
OWNERLESS = {("get", BASE), ("delete", BASE), ("post", f"{BASE}/resume")}


def id_of_verb(verb):
    method, path = verb
    return f"{method}-{path.removeprefix(BASE).strip('/').replace('/', '-') or 'agent'}"


def names_of(kind):
    """Return an agent's name for every verb, so that no verb affects another one's agent."""
    return {verb: f"{kind}-{number}" for number, verb in enumerate(VERBS)}


def send(fabric, verb, agent, other):
    (method, path), (body, _) = verb, VERBS[verb]
    url = path.format(agent=agent, operation="unknown-operation")
    if body is None:
        return fabric.http.request(method, url)
    text = json.dumps(body).replace("{agent}", agent).replace("{other}", other)
    return fabric.http.request(method, url, json=json.loads(text))


def check_refusal(answer, agent):
    """Check that a 503 names the agent and its lost node, and has a retry time."""
    assert int(answer.headers["retry-after"]) >= 1
    message = answer.json()["error"]["message"]
    assert agent in message, message
    assert "mac-b" in message, message


def settled(fabric, verb, agent, other="mac-c"):
    """Repeat a verb while it is refused temporarily; return the last answer."""
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
        for path, methods in describe_api()["paths"].items()
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

    Every verb is sent once at that moment; the other cases begin when the lease has expired.
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
@pytest.mark.parametrize("verb", VERBS, ids=id_of_verb)
def test_refusal_at_node_loss_names_the_agent_and_its_node(loss, verb):
    answer = loss.at_once[verb]
    if answer.status_code == 503:
        check_refusal(answer, names_of("first")[verb])
    else:
        assert answer.status_code in VERBS[verb][1], answer.text


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS, ids=id_of_verb)
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
@pytest.mark.parametrize("verb", VERBS, ids=id_of_verb)
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
