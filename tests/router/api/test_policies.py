"""Policies edit conversations in every dialect and are reported in the answer."""

import json

import pytest

from fabric.errors import RejectedError
from fabric.settings import PolicySettings, RouterSettings
from fabric.turn.messages import MessageRole
from router.app import build_app
from tests.router.counting_node import CountingNode
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
HEADER = "x-macfabric-policies"
OWN = "tests.router.policies.operators_own"
CUT = {"name": "truncate_older_than", "options": {"n": 1, "max_chars": 100}}
LONG = "r" * 900
SETTINGS = RouterSettings(
    takeover_after_s=20.0,
    policies=(
        PolicySettings("truncate_older_than", {"n": 2, "max_chars": 100}, "cut"),
        PolicySettings("strip_thinking"),
        PolicySettings(f"{OWN}:Shouting", by_default=False),
    ),
)


def chat(steps=4):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    messages += [{"role": "assistant", "content": "1", "reasoning_content": "hm"}]
    messages += [{"role": "user", "content": "go"}]
    for n in range(steps):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{n}", "content": LONG},
        ]
    return messages


def anthropic_chat(steps=4):
    messages = [{"role": "user", "content": "go"}]
    for n in range(steps):
        use = {"type": "tool_use", "id": f"c{n}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"c{n}", "content": LONG}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return messages


def items(steps=4):
    messages = [{"role": "user", "content": "go"}]
    for n in range(steps):
        call = {"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": "{}"}
        messages += [call, {"type": "function_call_output", "call_id": f"c{n}", "output": LONG}]
    return messages


BODIES = {
    "/v1/chat/completions": {"model": MODEL, "messages": chat()},
    "/v1/responses": {"model": MODEL, "input": items()},
    "/v1/messages": {"model": MODEL, "max_tokens": 9, "messages": anthropic_chat()},
}


def lengths(request):
    return [len("".join(m.texts)) for m in request.messages if m.role is MessageRole.TOOL]


@pytest.mark.parametrize("path", BODIES)
async def test_operator_policies_edit_conversations_in_every_dialect(path):
    async with rig("a", settings=SETTINGS) as fabric:
        http = fabric.http()
        answer = await http.post(path, json=BODIES[path])
        streamed = await http.post(path, json={**BODIES[path], "stream": True})
        requests = fabric["node-a"].requests

    strips = 1 if path == "/v1/chat/completions" else 0
    for each in (answer, streamed):
        assert each.headers[HEADER] == f"cut=2; strip_thinking={strips}"
    for request in requests:
        assert lengths(request) == [100, 100, 900, 900]


@pytest.mark.parametrize("path", BODIES)
async def test_request_overrides_operator_policies(path):
    cases = [
        ({HEADER: "keep_all"}, {}, "keep_all=0", [900] * 4),
        ({HEADER: ""}, {}, None, [900] * 4),
        ({}, {"policies": []}, None, [900] * 4),
        ({}, {"policies": [CUT]}, "truncate_older_than=3", [100] * 3 + [900]),
        ({}, {"policies": ["keep_all", "cut"]}, "keep_all=0; cut=2", [100, 100, 900, 900]),
        ({HEADER: "cut, keep_all"}, {"policies": [CUT]}, "cut=2; keep_all=0", [100, 100, 900, 900]),
    ]
    async with rig("a", settings=SETTINGS) as fabric:
        http = fabric.http()
        answers = [
            await http.post(path, json={**BODIES[path], "macfabric": own}, headers=headers)
            for headers, own, *_ in cases
        ]
        requests = fabric["node-a"].requests

    assert [answer.headers.get(HEADER) for answer in answers] == [report for *_, report, _ in cases]
    assert [lengths(request) for request in requests] == [left for *_, left in cases]


async def test_sdk_extra_body_policies_apply_to_every_choice():
    async with rig("a", settings=SETTINGS) as fabric:
        done = await fabric.openai().chat.completions.create(
            model=MODEL, messages=chat(), n=2, extra_body={"macfabric": {"policies": [CUT]}}
        )
        requests = fabric["node-a"].requests

    assert len(done.choices) == 2
    assert {tuple(lengths(request)) for request in requests} == {(100, 100, 100, 900)}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "own", "param"),
    [
        ({HEADER: "cut, nobody"}, {}, HEADER),
        ({HEADER: "x" * 65}, {}, HEADER),
        ({HEADER: ",".join(["keep_all"] * 17)}, {}, HEADER),
        ({}, {"policies": "cut"}, "macfabric.policies"),
        ({}, {"policies": ["keep_all"] * 17}, "macfabric.policies"),
        ({}, {"policies": ["cut", "nobody"]}, "macfabric.policies[1]"),
        ({}, {"policies": [7]}, "macfabric.policies[0]"),
        ({}, {"policies": [{}]}, "macfabric.policies[0].name"),
        ({}, {"policies": [{"name": "cut", "options": {"n": 1}}]}, "macfabric.policies[0]"),
        ({}, {"policies": [{**CUT, "options": {"n": 0}}]}, "macfabric.policies[0]"),
        ({}, {"policies": [f"{OWN}:Shouting"]}, "macfabric.policies[0]"),
    ],
)
async def test_unknown_policy_is_rejected_in_each_dialect(path, headers, own, param):
    async with rig("a", settings=SETTINGS) as fabric:
        body = {**BODIES[path], "macfabric": own}
        answer = await fabric.http().post(path, json=body, headers=headers)
        assert fabric["node-a"].requests == []

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert f"'{param}'" in error["message"] or error["message"].startswith(param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "go"}),
        ("/v1/agents/mira/generate", {"model": MODEL, "text": "go"}),
        ("/v1/agents/ivan/generate", {"model": MODEL, "messages": chat()[:2]}),
    ],
)
async def test_policies_are_rejected_without_a_whole_conversation(path, body):
    async with rig("a", settings=SETTINGS) as fabric:
        answer = await fabric.http().post(path, json=body)
        refused = await fabric.http().post(path, json=body, headers={HEADER: "cut"})

    assert answer.status_code == 200
    assert HEADER not in answer.headers
    assert refused.status_code == 400
    assert HEADER in refused.json()["error"]["message"]


async def test_is_error_tool_result_counts_as_failed_call():
    messages = anthropic_chat(2)
    messages[2]["content"][0] |= {"content": "all is quiet", "is_error": True}
    body = {**BODIES["/v1/messages"], "messages": messages}
    async with rig("a") as fabric:
        headers = {HEADER: "drop_failed_tool_calls"}
        answer = await fabric.http().post("/v1/messages", json=body, headers=headers)
        request = fabric["node-a"].requests[0]

    assert answer.headers[HEADER] == "drop_failed_tool_calls=2"
    assert [use.id for message in request.messages for use in message.uses] == ["c1"]


async def test_failing_policy_leaves_turn_unedited_and_is_reported():
    settings = RouterSettings(policies=(PolicySettings(f"{OWN}:Failing"),))
    async with rig("a", settings=settings) as fabric:
        answer = await fabric.chat("the secret is otter")
        request = fabric["node-a"].requests[0]

    assert answer.status_code == 200
    assert answer.headers[HEADER] == "Failing=failed (raised KeyError)"
    assert request.messages[0].texts == ("the secret is otter",)


async def test_policy_error_name_is_escaped_for_header():
    settings = RouterSettings(policies=(PolicySettings(f"{OWN}:Grumbling"),))
    async with rig("a", settings=settings) as fabric:
        answer = await fabric.chat("hello")

    assert answer.status_code == 200
    assert answer.headers[HEADER].startswith("Grumbling=failed (raised ???")
    assert len(answer.headers[HEADER]) < 150


async def test_sketch_is_computed_from_edited_conversation():
    """The router finds warm nodes by the sketch, so it must match what the node received."""
    async with rig("a", settings=SETTINGS) as fabric:
        http, path = fabric.http(), "/v1/chat/completions"
        await http.post(path, json=BODIES[path])
        edited = fabric["node-a"].requests[0]
        plain = [json.loads(json.dumps(each)) for each in chat()]
        plain[2].pop("reasoning_content")
        for at, message in enumerate(edited.messages):
            plain[at]["content"] = "".join(message.texts) if message.texts else None
        await http.post(path, json={"model": MODEL, "messages": plain}, headers={HEADER: ""})
        same = fabric["node-a"].requests[1]

    assert edited.sketch == same.sketch


async def test_count_tokens_counts_prompt_after_policies():
    node = CountingNode("node-a")
    async with rig(nodes=[node], settings=SETTINGS) as fabric:
        path, body = "/v1/messages/count_tokens", {"model": MODEL, "messages": anthropic_chat()}
        counted = await fabric.http().post(path, json=body)
        whole = await fabric.http().post(path, json=body, headers={HEADER: "keep_all"})

    assert counted.headers[HEADER] == "cut=2; strip_thinking=0"
    assert whole.json()["input_tokens"] - counted.json()["input_tokens"] == 2 * 800


async def test_router_refuses_to_start_with_unloadable_policy():
    settings = RouterSettings(policies=(PolicySettings("no.such:Policy"),))
    async with rig("a") as fabric:
        with pytest.raises(RejectedError, match=r"router\.policies\[0\]\.use: cannot import"):
            build_app(settings, fabric.services)
