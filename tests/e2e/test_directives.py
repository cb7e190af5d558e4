"""Directives through the router, by API and by command."""

import json

import httpx2
import pytest

from node.mlx.engine import Engine
from router.cli.main import main
from tests.support.local_fabric import local_fabric

KEYS = {"one": "key-of-tenant-number-one", "two": "key-of-tenant-number-two"}
NOTES = "Nobody knows why the library has a second bridge near the old harbour market. " * 12
CODE, SHIP = "otter lantern quartz", "amber falcon comet"
CALL = {"id": "call_17", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HISTORY = [
    {"role": "system", "content": "You remember what you are told."},
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_17",
     "content": f"{NOTES}The vault code of Mira is {CODE}. {NOTES}"},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": f"{NOTES}The ship name of Mira is {SHIP}."},
    {"role": "assistant", "content": "Noted."},
]  # fmt: skip
ASK_CODE = {"role": "user", "content": "The vault code of Mira is"}
ASK_SHIP = {"role": "user", "content": "The ship name of Mira is"}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", "right", api_keys=KEYS) as instance:
        yield instance


def send(fabric, method, path, tenant="one", **body):
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    url = f"{fabric.url}/v1/agents/{path}"
    payload = body if method == "POST" else None
    return httpx2.request(method, url, json=payload, headers=headers, timeout=120)


def chat(fabric, agent, messages, tenant="one", **headers):
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "x-agent-id": agent, **headers}
    payload = {"model": "recall", "messages": messages, "temperature": 0, "max_tokens": 24}
    url = f"{fabric.url}/v1/chat/completions"
    answer = httpx2.post(url, json=payload, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def text_of(answer):
    return answer.json()["choices"][0]["message"]["content"]


def clear(fabric, agent, mode, tenant="one", **more):
    item = {"tool_call_id": "call_17", "replacement": "[cleared]", "mode": mode}
    answer = send(fabric, "POST", f"{agent}/directives", tenant, directives=[item], **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached_share(answer):
    usage = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_tool_result_is_cleared_in_running_agent(fabric, mode):
    """The client still sends its whole history; the cache continues without that result."""
    agent = f"mira-{mode}"
    first = chat(fabric, agent, [*HISTORY, ASK_CODE])
    assert CODE in text_of(first)
    receipt = clear(fabric, agent, mode, operation="tidy-up-1")
    assert [each["is_applied"] for each in receipt["directives"]] == [False]
    second = chat(fabric, agent, [*HISTORY, ASK_SHIP])
    assert SHIP in text_of(second)
    assert (cached_share(second) > 0.9) == (mode == "amortize")
    row = send(fabric, "GET", agent).json()
    assert [each["is_applied"] for each in row["directives"]] == [True]
    assert row["amortized"] == (mode == "amortize")
    assert ("x-macfabric-amortized-tokens" in second.headers) == (mode == "amortize")
    assert CODE not in text_of(chat(fabric, agent, [*HISTORY, ASK_CODE]))
    # A move and a restart keep the same memory.
    target = {"left": "right", "right": "left"}[row["owner"]]
    assert send(fabric, "POST", f"{agent}/migrate", to=target).status_code == 200
    third = chat(fabric, agent, [*HISTORY, ASK_SHIP])
    assert SHIP in text_of(third)
    assert third.headers["x-macfabric-node"] == target
    assert cached_share(third) > 0.9
    undone = send(fabric, "DELETE", f"{agent}/directives/tidy-up-1").json()
    assert undone["directives"] == []
    item = {"tool_call_id": "call_17", "replacement": "[cleared]", "mode": mode}
    again = send(fabric, "POST", f"{agent}/directives", directives=[item], operation="tidy-up-1")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "operation_undone")
    assert CODE in text_of(chat(fabric, agent, [*HISTORY, ASK_CODE]))


@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_all_choices_see_the_directed_history(fabric, mode):
    agent = f"several-{mode}"
    chat(fabric, agent, [*HISTORY, ASK_CODE])
    clear(fabric, agent, mode)
    headers = {"authorization": f"Bearer {KEYS['one']}", "x-agent-id": agent}
    payload = {"model": "recall", "messages": [*HISTORY, ASK_CODE], "max_tokens": 24, "n": 3}
    url = f"{fabric.url}/v1/chat/completions"
    answer = httpx2.post(url, json={**payload, "temperature": 0}, headers=headers, timeout=120)
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert len(texts) == 3
    assert not any(CODE in text for text in texts)


def test_all_choices_of_edited_agent_reuse_its_cache(fabric, monkeypatch):
    """At temperature 0 all choices are equal, and none recomputes the first one's kept cache."""
    computed, prefill, agent = [], Engine.prefill, "siblings"

    def counted(engine, cache, tokens):
        computed.append(len(tokens))
        return prefill(engine, cache, tokens)

    chat(fabric, agent, [*HISTORY, ASK_CODE])
    clear(fabric, agent, "amortize")
    monkeypatch.setattr(Engine, "prefill", counted)
    headers = {"authorization": f"Bearer {KEYS['one']}", "x-agent-id": agent}
    payload = {"model": "recall", "messages": [*HISTORY, ASK_SHIP], "max_tokens": 24, "n": 4}
    url = f"{fabric.url}/v1/chat/completions"
    answer = httpx2.post(url, json={**payload, "temperature": 0}, headers=headers, timeout=120)
    assert len({choice["message"]["content"] for choice in answer.json()["choices"]}) == 1
    assert sum(computed) < answer.json()["usage"]["prompt_tokens"] / 2


def test_edits_header_restores_exact_memory(fabric):
    """Use a tenant without another agent that has computed the same prefix."""
    chat(fabric, "exact", [*HISTORY, ASK_CODE], "two")
    clear(fabric, "exact", "amortize", "two")
    history = [*HISTORY, ASK_SHIP]
    assert cached_share(chat(fabric, "exact", history, "two")) > 0.9
    exact = chat(fabric, "exact", history, "two", **{"x-macfabric-edits": "exact"})
    assert cached_share(exact) < 0.5
    assert SHIP in text_of(exact)
    assert not send(fabric, "GET", "exact", "two").json()["amortized"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "directives"),
        ({"directives": []}, "directives"),
        ({"directives": [{}]}, "directives[0]"),
        ({"directives": [{"tool_call_id": "a", "message": {}}]}, "directives[0]"),
        ({"directives": [{"tool_call_id": 1}]}, "directives[0].tool_call_id"),
        ({"directives": [{"tool_call_id": "a", "mode": "melt"}]}, "directives[0].mode"),
        ({"directives": [{"tool_call_id": "a", "replacement": "x" * 99_999}]},
         "directives[0].replacement"),
        ({"directives": [{"message": {"role": "system", "content": "x"}}]},
         "directives[0].message.role"),
        ({"directives": [{"message": {"role": "user"}}]}, "directives[0].message.content"),
        ({"directives": [{"tool_call_id": "a"}] * 300}, "directives"),
    ],
)  # fmt: skip
def test_invalid_directive_is_rejected(fabric, body, param):
    chat(fabric, "strict", [ASK_SHIP])
    answer = send(fabric, "POST", "strict/directives", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert send(fabric, "GET", "strict").json()["directives"] == []


def test_directives_are_limited_to_own_agents(fabric):
    chat(fabric, "private", [*HISTORY, ASK_CODE])
    item = {"tool_call_id": "call_17"}
    for tenant, agent in (("two", "private"), ("one", "nobody")):
        answer = send(fabric, "POST", f"{agent}/directives", tenant, directives=[item])
        assert answer.status_code == 404
    assert send(fabric, "GET", "private").json()["directives"] == []


def test_command_adds_and_undoes_directives(fabric, capsys):
    chat(fabric, "cli", [*HISTORY, ASK_CODE])
    common = ["--url", fabric.url, "--key", KEYS["one"], "--json"]
    assert main(["direct", "cli", "--result-of", "call_17", "--edits", "amortize", *common]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["result_of"] for each in printed["directives"]] == ["call_17"]
    assert main(["direct", "cli", "--undo", printed["operation"], *common]) == 0
    assert json.loads(capsys.readouterr().out)["directives"] == []
