"""A whole fabric: a node is drained while it streams, an agent is forked, a replica takes over."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.tiny_models import ONE_LAYER, write_model

SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 24}
MESSAGES = [SYSTEM, {"role": "user", "content": "größer 東京 naïve"}]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[LocalFabric]:
    folder: Path = tmp_path_factory.mktemp("moves")
    model = str(write_model(folder / "model", ONE_LAYER))
    with local_fabric(folder, model, "node-a", "node-b", "node-c") as instance:
        yield instance


def post(fabric: LocalFabric, path: str, **body: Any) -> dict[str, Any]:
    response = fabric.http.post(f"/v1/{path}", json=body)
    assert response.status_code in (200, 202), response.text
    return dict(response.json())


def node(fabric: LocalFabric, name: str) -> dict[str, Any]:
    rows = fabric.http.get("/v1/nodes").json()["data"]
    return dict(next(row for row in rows if row["name"] == name))


def wait_for(condition: Any) -> Any:
    """Poll until a condition returns a true value; return that."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "the condition never held"
        time.sleep(0.05)
    return found


def stream(fabric: LocalFabric, agent: str, started: threading.Event) -> str:
    response = fabric.openai.chat.completions.create(
        model=fabric.model_name, messages=MESSAGES, stream=True, max_tokens=160, temperature=0,
        extra_headers={"X-Agent-ID": agent}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    text = ""
    for chunk in response:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        if len(text) > 20:
            started.set()
    return text


def own_conversation(name: str) -> list[dict[str, Any]]:
    """Return a conversation that shares no block with others."""
    return [{"role": "system", "content": f"{name}: {SYSTEM['content']}"}, MESSAGES[1]]


def continued(
    answer: Any, words: str, began: list[dict[str, Any]] = MESSAGES
) -> list[dict[str, Any]]:
    return [
        *began,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": words},
    ]


def test_drain_empties_node_while_its_agent_streams(fabric):
    calm = stream(fabric, "calm", threading.Event())
    home = fabric.http.get("/v1/agents/calm").json()["owner"]
    idle = fabric.chat(MESSAGES, "idle")
    if idle.node != home:
        fabric.migrate("idle", home)
    texts, started = [], threading.Event()
    fabric.migrate("calm", home)
    # The streaming agent is placed there by moving its first turn's cache.
    fabric.chat(MESSAGES, "streamer")
    fabric.migrate("streamer", home)
    streaming = threading.Thread(target=lambda: texts.append(stream(fabric, "streamer", started)))
    streaming.start()
    assert started.wait(WAIT_S)
    drain_answer = post(fabric, f"nodes/{home}/drain")
    done = wait_for(lambda: (d := node(fabric, home)["drain"]) and d["state"] != "draining" and d)
    streaming.join(WAIT_S)

    assert drain_answer["state"] in ("draining", "drained")
    assert (done["state"], done["agents_moved"], done["stuck"]) == ("drained", 3, [])
    assert texts == [calm], "the stream lost, repeated or changed tokens"
    wait_for(lambda: node(fabric, home)["agents"] == 0)  # by the next heartbeat
    assert node(fabric, home)["state"] == "draining"
    again = fabric.chat(continued(idle, "more"), "idle")
    assert again.node != home
    assert again.cached_tokens > 100
    assert fabric.chat(MESSAGES, "newcomer").node != home
    assert post(fabric, f"nodes/{home}/undrain")["state"] == "ready"
    wait_for(lambda: node(fabric, home)["state"] == "ready")


def test_forks_answer_like_their_source(fabric):
    began = own_conversation("mother")
    first = fabric.chat(began, "mother")
    others = [name for name in fabric.services if name != first.node]
    beside = post(fabric, "agents/mother/fork", **{"as": "beside"})
    afar = post(fabric, "agents/mother/fork", **{"as": "afar", "to": others[0]})
    original = fabric.chat(continued(first, "the dog", began), "mother")
    copied = [fabric.chat(continued(first, "the dog", began), name) for name in ("beside", "afar")]
    assert fabric.http.delete("/v1/agents/mother").json()["deleted"] is True
    later = [*continued(first, "the dog", began), {"role": "assistant", "content": original.text},
             {"role": "user", "content": "the log"}]  # fmt: skip

    assert (beside["node"], beside["bytes_sent"]) == (first.node, 0)
    assert afar["node"] == others[0]
    assert afar["bytes_sent"] > 0
    assert [answer.text for answer in copied] == [original.text, original.text]
    assert [answer.node for answer in copied] == [first.node, others[0]]
    assert {answer.cached_tokens >= original.cached_tokens for answer in copied} == {True}
    assert fabric.chat(later, "beside").cached_tokens > original.cached_tokens
    assert fabric.http.get("/v1/agents/mother").status_code == 404
    metric = f'macfabric_transfer_events_total{{event="blocks",node="{others[0]}",side="fetch"}}'
    wait_for(lambda: metric in fabric.http.get("/metrics").text)


def test_replica_takes_over_from_lost_nodes(fabric):
    began = own_conversation("precious")
    first = fabric.chat(began, "precious")
    keeper = next(name for name in fabric.services if name != first.node)
    kept = post(fabric, "agents/precious/replicate", to=keeper)
    second = fabric.chat(continued(first, "the dog", began), "precious")

    def copies() -> Any:
        shown = fabric.http.get("/v1/agents/precious").json()["copies"]
        return [copy for copy in shown if copy["node"] == keeper and copy["current"]]

    assert kept["kept"] is True
    assert wait_for(copies)[0]["tokens"] > kept["tokens"]
    third = [*continued(first, "the dog", began), {"role": "assistant", "content": second.text},
             {"role": "user", "content": "the log"}]  # fmt: skip
    others = [name for name in fabric.services if name != keeper]
    for name in others:
        fabric._down.add(name)
        fabric.services[name].stop()
    try:
        answer = fabric.chat(third, "precious")
        shown = fabric.http.get("/v1/agents/precious").json()
    finally:
        for name in others:
            fabric.services[name] = fabric._start(name)
            fabric._down.discard(name)

    assert answer.node == shown["owner"] == keeper
    assert answer.epoch > 1
    assert answer.cached_tokens > second.cached_tokens
    assert answer.cache == "peer"
