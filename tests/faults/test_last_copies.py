"""The last reachable copy of an agent is not dropped, and is served after its owner is lost."""

import time

import pytest

from tests.support.process_fabric import process_fabric

DEADLINE_S = 60.0
FACT = "The code of the vault is otter lantern quartz."
MESSAGES = [
    {"role": "user", "content": FACT},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "The code of the vault is"},
]


def agents_on_mac_b(fabric, *agents):
    """Make agents on mac-b, each with a copy on mac-a."""
    for agent in agents:
        if fabric.chat(MESSAGES, agent=agent, max_tokens=4).node != "mac-b":
            fabric.migrate(agent, "mac-b")
        body = {"to": "mac-a", "keep": False}
        copied = fabric.http.post(f"/v1/agents/{agent}/replicate", json=body)
        assert copied.status_code == 200, copied.text


def drop_copy(fabric, agent):
    body = {"from": "disk", "node": "mac-a"}
    answer = fabric.http.post(f"/v1/agents/{agent}/evict", json=body)
    return answer.status_code, (answer.json().get("error") or {}).get("code")


@pytest.mark.slow
def test_last_replica_is_not_dropped_and_serves_without_its_owner(tmp_path):
    with process_fabric(tmp_path, "recall", "mac-a", "mac-b") as fabric:
        fabric.await_agents()
        agents_on_mac_b(fabric, "dropped", "left")
        fabric.kill("mac-b")
        until_s, answers = time.monotonic() + DEADLINE_S, []
        while not answers or answers[-1][0] == 503:
            answers.append(drop_copy(fabric, "dropped"))
            assert time.monotonic() < until_s, answers
        assert answers[0] == (503, "node_lost"), "its lease has not expired"
        assert answers[-1] == (409, "only_copy"), answers
        turn = fabric.chat(MESSAGES, agent="dropped", max_tokens=4)
        assert (turn.node, turn.cached_tokens > 20) == ("mac-a", True)

        del fabric.services["mac-b"]
        fabric.restart_router()  # this router never meets mac-b
        shown = fabric.http.get("/v1/agents/left").json()
        assert (shown["owner"], shown["replicas"]) == (None, ["mac-a"])
        pinned = fabric.http.post("/v1/agents/left/pin", json={"pinned": True})
        assert (pinned.status_code, pinned.json()["node"]) == (200, "mac-a"), pinned.text
        assert fabric.http.get("/v1/agents/left").json()["owner"] == "mac-a"
