"""Requests that users of other servers report as refused or answered wrongly, on real nodes."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.waiting import wait_until

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, GENERATE = "/v1/completions", "/v1/agents/{agent}/generate"
FACT = "The vault code of Mira is otter lantern quartz."
ASK = "The vault code of Mira is"
CONVERSATION = [
    {"role": "user", "content": FACT},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": ASK},
]
RULES = "The rule of the house is kindness first. " * 40
USER = [{"role": "user", "content": "hi there"}]
READ = {"name": "read_file", "description": "Reads a file."}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFabric]:
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "only") as instance:
        yield instance


def post(fabric: LocalFabric, path: str, body: dict[str, Any], agent: str = "") -> Any:
    headers = {"x-agent-id": agent} if agent and "agents" not in path else {}
    body = {"model": "recall", **body}
    return fabric.http.post(path.format(agent=agent), json=body, headers=headers)


def prompt_of(path: str) -> dict[str, Any]:
    return {
        RESPONSES: {"input": USER},
        COMPLETIONS: {"prompt": "hi there"},
        GENERATE: {"text": "hi there"},
    }.get(path, {"messages": USER})


LIMITS = {
    CHAT: ("max_tokens", "max_completion_tokens"),
    MESSAGES: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    COMPLETIONS: ("max_tokens",),
    GENERATE: ("max_tokens",),
}
FIELDS = [(path, field) for path, fields in LIMITS.items() for field in fields]


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_excessive_limit_is_capped_and_integral_float_is_accepted(fabric, path, field):
    stops = {MESSAGES: {"stop_sequences": ["e"]}, RESPONSES: {}}.get(path, {"stop": ["e"]})
    short = {"temperature": 0, **stops}
    for limit in (65_535, 200_000):
        body = {**prompt_of(path), **short, field: limit}
        if path == RESPONSES:  # no stop texts: the answer ends by itself
            body["input"] = CONVERSATION
        answer = post(fabric, path, body, "capped")
        assert answer.status_code == 200, answer.text
    answer = post(fabric, path, {**prompt_of(path), **short, field: 3.0}, "float")
    assert answer.status_code == 200, answer.text
    wrong = post(fabric, path, {**prompt_of(path), field: 3.5}, "float")
    assert wrong.status_code == 400


VALUES = [
    ({"seed": -1, "top_k": -1}, CHAT),
    ({"seed": 42.0, "top_k": 5.0}, CHAT),
    ({"seed": -1, "top_k": -1, "n": 2.0}, COMPLETIONS),
    ({"seed": 42.0}, GENERATE),
]


@pytest.mark.parametrize(("more", "path"), VALUES, ids=str)
def test_values_accepted_by_other_servers_are_accepted(fabric, more, path):
    answer = post(fabric, path, {**prompt_of(path), "max_tokens": 4, **more}, "values")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_strict_flag_as_text_enforces_schema(fabric, path):
    schema = {
        "type": "object",
        "properties": {"joke": {"type": "string", "maxLength": 12}},
        "required": ["joke"],
        "additionalProperties": False,
    }
    named = {"name": "joke", "strict": "true", "schema": schema}
    body = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": named}},
        RESPONSES: {"text": {"format": {"type": "json_schema", **named}}},
    }[path]
    answer = post(fabric, path, {**prompt_of(path), **body})
    assert answer.status_code == 200, answer.text
    payload = answer.json()
    text = (
        payload["choices"][0]["message"]["content"]
        if path == CHAT
        else payload["output"][-1]["content"][0]["text"]
    )
    assert isinstance(json.loads(text)["joke"], str)


TOOLS = {
    "without parameters": {},
    "parameters null": {"parameters": None},
    "properties null": {"parameters": {"type": "object", "properties": None}},
    "a property that is true": {"parameters": {"type": "object", "properties": {"a": True}}},
    "no type": {"parameters": {"properties": {"a": {"type": "string"}}}},
    "empty": {"parameters": {}},
}


@pytest.mark.parametrize("name", TOOLS)
def test_tools_with_loose_schemas_are_accepted(fabric, name):
    fields = TOOLS[name]
    chat = {"tools": [{"type": "function", "function": {**READ, **fields}}]}
    flat = {"tools": [{"type": "function", **READ, **fields}]}
    for path, body in ((CHAT, chat), (RESPONSES, flat), (GENERATE, chat)):
        sent = {"messages": USER} if path == GENERATE else prompt_of(path)
        answer = post(fabric, path, {**sent, **body, LIMITS[path][0]: 4}, "tools")
        assert answer.status_code == 200, (path, answer.text)


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.mark.parametrize("tools", [[SEARCH], [SEARCH, {**READ, "input_schema": {}}]], ids=len)
@pytest.mark.parametrize("stream", [False, True])
def test_hosted_search_is_dropped_and_listed(fabric, tools, stream):
    body = {"messages": USER, "max_tokens": 4, "tools": tools, "stream": stream}
    answer = post(fabric, MESSAGES, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-macfabric-ignored"] == "web_search_20250305"


def test_template_options_keep_prefix_warm(fabric):
    cached = []
    for question in ("What is two?", "What is three?", "What is four?"):
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
        more = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 4}
        usage = post(fabric, CHAT, {"messages": messages, **more}).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        prompt = usage["prompt_tokens"]
    assert cached[0] == 0
    assert min(cached[1:]) >= prompt - 20 > 200


def events(answer: Any) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line[:6] == "data: "]


def test_usage_counts_in_first_messages_event_add_up(fabric):
    rules = f"Count them. {RULES}"
    marked = [{"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": ASK}]
    for number in range(2):
        body = {"system": marked, "messages": turns, "max_tokens": 8, "stream": True}
        streamed = events(post(fabric, MESSAGES, body, "counted"))
        usage = streamed[0]["message"]["usage"]
        counted = post(fabric, f"{MESSAGES}/count_tokens", {"system": marked, "messages": turns})
        parts = [
            usage[name]
            for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        ]
        assert sum(parts) == counted.json()["input_tokens"] > 200
        assert bool(parts[1]) == bool(number), "only the second turn may read from the cache"
        assert parts[2], "tokens before the mark must be written"
        text = "".join(e["delta"].get("text", "") for e in streamed if "delta" in e)
        turns += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": [{"type": "text", "text": "And now?",
                                          "cache_control": {"type": "ephemeral"}}]},
        ]  # fmt: skip


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {"temperature": 0.7, "seed": 5, "logprobs": True, "top_logprobs": 2, "min_p": 0.05},
]


def test_mixed_concurrent_requests_answer_as_each_alone(fabric):
    def ask(number: int) -> str:
        body = {"messages": CONVERSATION, "max_tokens": 12, **MIXED[number % len(MIXED)]}
        return str(post(fabric, CHAT, body).json()["choices"][0])

    alone = [ask(number) for number in range(len(MIXED))]
    with ThreadPoolExecutor(3 * len(MIXED)) as pool:
        for _ in range(2):
            assert list(pool.map(ask, range(3 * len(MIXED)))) == alone * 3


def test_disconnects_leave_nothing_running(fabric):
    """Clients disconnect in the prompt, in the answer, and before the answer's first byte."""
    (service,) = fabric.services.values()
    for number in range(12):
        body = {"model": "recall", "max_tokens": 2_000, "stream": True, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": f"{number} {RULES}"}]
        with fabric.http.stream("POST", CHAT, json=body) as answer:
            if number % 4 == 3:
                next(answer.iter_bytes())
    assert fabric.chat(CONVERSATION, "after").text.strip().startswith("otter lantern quartz")
    wait_until(lambda: not service.node.live_turns)
    assert service.node.resources.engine.budget.reserved_bytes == 0


def test_answers_are_unaffected_by_other_conversations(fabric):
    def turns(name: str) -> list[tuple[str, int]]:
        found = []
        for number in range(3):
            messages = [{"role": "system", "content": RULES},
                     {"role": "user", "content": f"{number}: {FACT} {ASK}"}]  # fmt: skip
            response = post(
                fabric, CHAT, {"messages": messages, "temperature": 0, "max_tokens": 8}, name
            )
            usage = response.json()["usage"]
            found.append(
                (response.json()["choices"][0]["message"]["content"], usage["prompt_tokens"])
            )
        return found

    clean = turns("clean")
    for number in range(3):
        other = {"role": "user", "content": f"The code of {number} is red stone. The code is"}
        messages = [{"role": "system", "content": RULES}, other]
        post(fabric, CHAT, {"messages": messages, "max_tokens": 8}, f"foreign-{number}")
    assert turns("fresh") == clean


def test_returning_node_does_not_restore_erased_agent(tmp_path):
    messages = [{"role": "system", "content": RULES}, *CONVERSATION]
    with local_fabric(tmp_path, "recall", "node-a", "node-b") as fabric:
        first = fabric.chat(messages, "wanderer")
        (other,) = fabric.services.keys() - {first.node}
        copied = fabric.http.post("/v1/agents/wanderer/replicate", json={"to": other})
        assert copied.status_code == 200, copied.text
        with fabric.stopped(first.node):
            served = fabric.chat(messages, "wanderer")
            assert (served.node, served.text) == (other, first.text)
            assert served.cached_tokens > 200
            erased = fabric.http.delete("/v1/agents/wanderer")
            assert erased.status_code in (200, 202), erased.text
        assert fabric.http.get("/v1/agents/wanderer").status_code == 404
        nodes = fabric.http.get("/v1/nodes").json()["data"]
        assert [node["agents"] for node in nodes] == [0, 0]


def test_proxy_variables_do_not_affect_node_traffic(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # a port without a listener
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    messages = [{"role": "system", "content": RULES}, *CONVERSATION]
    with local_fabric(tmp_path, "recall", "node-a", "node-b") as fabric:
        headers = fabric.http.headers
        fabric.http = httpx2.Client(
            base_url=fabric.url, headers=headers, timeout=120, trust_env=False
        )
        first = post(fabric, CHAT, {"messages": messages, "max_tokens": 8}, "direct")
        assert first.status_code == 200, first.text
        home = first.headers["x-macfabric-node"]
        fabric.migrate("direct", "node-b" if home == "node-a" else "node-a")
        moved = post(fabric, CHAT, {"messages": messages, "max_tokens": 8}, "direct")
        usage = moved.json()["usage"]
        assert moved.headers["x-macfabric-node"] != home
        assert usage["prompt_tokens_details"]["cached_tokens"] > 200
        file = fabric.http.post("/v1/agents/direct/hibernate")
        assert file.status_code == 200, file.text
