"""POST /v1/agents/ID/generate, to which clients send only new text."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import jsonschema
import pytest

from tests.support.local_fabric import local_fabric

KEYS = {"one": "key-of-tenant-number-one", "two": "key-of-tenant-number-two"}
FACT = {"role": "user", "content": "The vault code of Mira is otter lantern quartz."}
NOTED = {"role": "assistant", "content": "Noted."}
ASK = {"role": "user", "content": "The vault code of Mira is"}
LOOK = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 8}, "far": {"type": "boolean"}},
    "required": ["at", "far"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": LOOK}} for name in ("look", "go")
]
CODE = "otter lantern quartz"


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", "right", api_keys=KEYS) as instance:
        yield instance


def generate(fabric, agent, tenant="one", **body):
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    payload = {"temperature": 0, "max_tokens": 24, **body}
    url = f"{fabric.url}/v1/agents/{agent}/generate"
    return httpx2.post(url, json=payload, headers=headers, timeout=120)


def chat(fabric, agent, messages):
    headers = {"authorization": f"Bearer {KEYS['one']}", "x-agent-id": agent}
    payload = {"model": "recall", "messages": messages, "temperature": 0, "max_tokens": 24}
    url = f"{fabric.url}/v1/chat/completions"
    answer = httpx2.post(url, json=payload, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def json_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_generate_creates_agent_and_continues_from_its_cache(fabric):
    first = json_of(generate(fabric, "mira", messages=[FACT, NOTED, ASK]))
    second = json_of(generate(fabric, "mira", messages=[ASK]))
    owner = second["node"]
    other = {"left": "right", "right": "left"}[owner]
    moved = httpx2.post(
        f"{fabric.url}/v1/agents/mira/migrate",
        json={"to": other},
        headers={"authorization": f"Bearer {KEYS['one']}"},
        timeout=60,
    )
    third = json_of(generate(fabric, "mira", messages=[ASK]))

    assert CODE in first["text"]
    assert CODE in second["text"]
    assert CODE in third["text"]
    assert moved.status_code == 200
    assert third["node"] == other
    for before, after in ((first, second), (second, third)):
        known_tokens = before["prompt_tokens"] + before["completion_tokens"]
        assert after["cached_tokens"] == known_tokens, "cached tokens were computed again"
        assert after["prompt_tokens"] > known_tokens


def test_generate_equals_chat_with_whole_history(fabric):
    messages = [FACT, NOTED, ASK]
    first = json_of(generate(fabric, "vera", messages=messages))
    assistant = {"role": "assistant", "content": first["text"]}
    appended = json_of(generate(fabric, "vera", messages=[ASK]))
    whole = chat(fabric, "vera-whole", [*messages, assistant, ASK]).json()

    assert appended["text"] == whole["choices"][0]["message"]["content"]
    assert appended["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_generate_continues_chat_agent_and_appends_raw_text(fabric):
    chat(fabric, "ivan", [FACT, NOTED, ASK])
    going = json_of(generate(fabric, "ivan", text="\n", max_tokens=2))
    answer = json_of(generate(fabric, "ivan", messages=[ASK]))
    raw = json_of(generate(fabric, "raw", text="otter lantern quartz heron. otter lantern"))
    more = json_of(generate(fabric, "raw", text=" heron. otter lantern"))

    assert going["cached_tokens"] > 0
    assert CODE in answer["text"]
    assert raw["cached_tokens"] == 0
    assert more["cached_tokens"] > 0


def test_stream_has_named_events(fabric):
    generate(fabric, "sami", messages=[FACT, NOTED, ASK])
    answer = generate(fabric, "sami", messages=[ASK], stream=True)
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n")]
    events = [(f[0].removeprefix("event: "), json.loads(f[1][6:])) for f in frames if len(f) == 2]

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert CODE in "".join(data["text"] for name, data in events if name == "text")
    assert events[-1][0] == "end"
    assert events[-1][1]["finish_reason"] == "stop"


def test_required_calls_work_for_new_and_existing_agents(fabric):
    options = {"tools": TOOLS, "max_tokens": 300}
    named = {"type": "function", "function": {"name": "go"}}
    first = json_of(
        generate(fabric, "kim", messages=[FACT, NOTED, ASK], tool_choice=named, **options)
    )
    (call,) = first["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "gone"}
    second = json_of(
        generate(
            fabric,
            "kim",
            messages=[result, ASK],
            tool_choice="required",
            parallel_tool_calls=False,
            **options,
        )
    )
    third = json_of(generate(fabric, "kim", messages=[ASK]))

    assert call["name"] == "go"
    for reply in (first, second):
        assert (reply["finish_reason"], reply["text"]) == ("tool_calls", "")
        (one,) = reply["tool_calls"]
        jsonschema.validate(json.loads(one["arguments"]), LOOK)
    assert second["cached_tokens"] == first["prompt_tokens"] + first["completion_tokens"]
    assert (third["tool_calls"], bool(third["text"])) == ([], True)


def test_streamed_call_arrives_whole(fabric):
    answer = generate(
        fabric,
        "lou",
        messages=[ASK],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        stream=True,
    )
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n")]
    events = [(f[0].removeprefix("event: "), json.loads(f[1][6:])) for f in frames if len(f) == 2]
    assert [name for name, _ in events] == ["tool_call", "end"]
    jsonschema.validate(json.loads(events[0][1]["arguments"]), LOOK)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"text": "x", "tools": TOOLS}, "tools"),
        ({"messages": [ASK], "tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"messages": [ASK], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [ASK], "tools": [*TOOLS, {"type": "function"}]}, "tools[2].function"),
    ],
)
def test_invalid_tools_are_rejected(fabric, more, param):
    answer = generate(fabric, "mia", **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_restarted_node_continues_agent(fabric):
    first = json_of(generate(fabric, "nora", messages=[FACT, NOTED, ASK]))
    fabric.restart(first["node"])
    second = json_of(generate(fabric, "nora", messages=[ASK]))

    assert CODE in second["text"]
    assert second["cached_tokens"] == first["prompt_tokens"] + first["completion_tokens"]


def test_agent_names_are_scoped_by_tenant(fabric):
    json_of(generate(fabric, "olga", messages=[FACT, NOTED, ASK]))
    foreign = json_of(generate(fabric, "olga", tenant="two", messages=[ASK]))

    assert CODE not in foreign["text"]
    assert foreign["cached_tokens"] == 0


def test_concurrent_generates_never_lose_a_turn(fabric):
    json_of(generate(fabric, "twin", messages=[FACT, NOTED, ASK]))
    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(generate, fabric, "twin", messages=[ASK]) for _ in range(4)]
        answers = [each.result() for each in pending]
    after = json_of(generate(fabric, "twin", messages=[ASK]))
    good = [answer.json() for answer in answers if answer.status_code == 200]

    assert good
    for answer in answers:
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "agent_changed")
    longest = max(each["prompt_tokens"] + each["completion_tokens"] for each in good)
    assert after["cached_tokens"] == longest
    assert len({each["prompt_tokens"] for each in good}) == len(good), "turns have equal prompts"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "messages": [ASK]}, "text"),
        ({"text": ""}, "text"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "owl", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"text": "a", "max_tokens": 0}, "max_tokens"),
        ({"text": "a", "stop": [""]}, "stop"),
    ],
)
def test_invalid_request_is_rejected_with_its_parameter(fabric, body, param):
    answer = generate(fabric, "nobody", **body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_unknown_model_is_404_and_wrong_key_is_401(fabric):
    unknown = generate(fabric, "nobody", text="a", model="nonsense")
    wrong = httpx2.post(
        f"{fabric.url}/v1/agents/mira/generate",
        json={"text": "a"},
        headers={"authorization": "Bearer wrong"},
    )

    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert wrong.status_code == 401
