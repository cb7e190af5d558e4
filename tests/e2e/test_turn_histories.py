"""The id of a turn from its request to its agent's history, over moves, restarts and forks."""

import pytest

from tests.support.local_fabric import local_fabric
from tests.support.tiny_models import LLAMA, write_model

FIRST, SECOND = "turn-canary-0001", "turn-canary-0002"
SECRET = "xylographic"


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("histories")
    with local_fabric(folder, write_model(folder / "model", LLAMA), "left", "right") as made:
        yield made


def chat(fabric, agent, turn, *contents):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    body = {"model": fabric.http.get("/v1/models").json()["data"][0]["id"], "messages": messages}
    headers = {"x-agent-id": agent, "x-request-id": turn}
    answer = fabric.http.post(
        "/v1/chat/completions", json=body | {"max_tokens": 6}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == turn
    return answer


def turns(fabric, agent):
    answer = fabric.http.get(f"/v1/agents/{agent}/turns")
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def files_with(folder, text):
    return [path for path in folder.rglob("*.mf") if text.encode() in path.read_bytes()]


def test_history_follows_its_agent_until_it_is_erased(fabric):
    first = chat(fabric, "mira", FIRST, f"Tell me of {SECRET} seas.")
    home = first.headers["x-macfabric-node"]
    other = ({"left", "right"} - {home}).pop()
    assert fabric.http.post("/v1/agents/mira/migrate", json={"to": other}).status_code == 200
    first_answer = first.json()["choices"][0]["message"]["content"]
    chat(fabric, "mira", SECOND, f"Tell me of {SECRET} seas.", first_answer, "And of woods?")
    kept = turns(fabric, "mira")
    assert [(turn["id"], turn["node"]) for turn in kept] == [(SECOND, other), (FIRST, home)]
    assert [turn["cache"] == "cold" for turn in kept] == [False, True]
    assert all(turn["times"]["first_token_s"] > 0 for turn in kept)
    assert SECRET not in str(kept)

    fabric.restart(other)
    assert turns(fabric, "mira") == kept

    forked = fabric.http.post("/v1/agents/mira/fork", json={"as": "ivan"})
    assert forked.status_code == 200
    assert turns(fabric, "ivan") == []

    assert files_with(fabric._folder, FIRST) != []
    for agent in ("ivan", "mira"):
        assert fabric.http.delete(f"/v1/agents/{agent}").json()["deleted"]
    assert files_with(fabric._folder, FIRST) == []
    assert fabric.http.get("/v1/agents/mira/turns").status_code == 404
