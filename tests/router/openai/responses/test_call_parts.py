import json

import pytest

from fabric.turn.generation import (
    Delta,
    Finished,
    FinishReason,
    ToolCall,
    ToolCallPart,
    ToolCalls,
)
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
BODY = {
    "model": MODEL,
    "input": "say one two",
    "stream": True,
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object"}},
        {"type": "custom", "name": "patch"},
    ],
}
PARTS = [
    Delta(0, "Let me see."),
    ToolCallPart(1, "first", "look"),
    ToolCallPart(2, "first", "", '{"at": '),
    ToolCallPart(3, "first", "", '"sky"}'),
    ToolCalls((ToolCall("look", '{"at": "sky"}', "first"),)),
    ToolCallPart(4, "second", "patch", '{"input": '),
    ToolCallPart(5, "second", "", '"x"}'),
    ToolCalls((ToolCall("patch", '{"input": "x"}', "second"),)),
    ToolCalls((ToolCall("look", "{}"), ToolCall("look", "{}"))),
    Finished(FinishReason.TOOL_CALLS, 9),
]


async def events(fabric, node_events, **more):
    fabric["node-a"].behaviour.events = node_events
    answer = await fabric.http().post("/v1/responses", json={**BODY, **more})
    return [json.loads(part.split("data: ")[1]) for part in answer.text.split("\n\n")[:-1]]


async def test_tool_calls_stream_as_they_are_generated():
    async with rig("a") as fabric:
        found = await events(fabric, PARTS)

    deltas = [each["delta"] for each in found if each["type"].endswith("arguments.delta")]
    inputs = [each["delta"] for each in found if each["type"].endswith("input.delta")]
    output = found[-1]["response"]["output"]
    assert (deltas, inputs) == (['{"at": ', '"sky"}', "{}", "{}"], ["x"])
    assert [item.get("call_id") for item in output][:3] == [None, "first", "second"]
    assert (output[1]["arguments"], output[2]["input"]) == ('{"at": "sky"}', "x")
    assert {item["status"] for item in output} == {"completed"}
    assert len(output) == len({item["id"] for item in output}) == 5
    assert output == [each["item"] for each in found if each["type"].endswith("item.done")]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))


async def test_truncated_tool_call_is_incomplete():
    cut = [
        *PARTS[:3],
        ToolCalls((ToolCall("look", '{"at": ', "first", is_broken=True),)),
        Finished(FinishReason.LENGTH, 4, broken_calls=1),
    ]
    async with rig("a") as fabric:
        found = await events(fabric, cut)
        whole = (await fabric.http().post("/v1/responses", json={**BODY, "stream": False})).json()

    assert found[-1]["type"] == "response.incomplete"
    for response in (found[-1]["response"], whole):
        output = response["output"]
        assert response["status"] == "incomplete"
        assert [(each["type"], each["status"]) for each in output] == [
            ("message", "completed"), ("function_call", "incomplete"),
        ]  # fmt: skip
        assert (output[1]["arguments"], output[1]["call_id"]) == ('{"at": ', "first")


async def test_truncated_custom_tool_call_keeps_partial_text():
    cut = [
        ToolCallPart(4, "second", "patch", '{"input": "a\\nb'),
        ToolCalls((ToolCall("patch", '{"input": "a\\nb', "second", is_broken=True),)),
        Finished(FinishReason.LENGTH, 4, broken_calls=1),
    ]
    async with rig("a") as fabric:
        found = await events(fabric, cut)
        whole = (await fabric.http().post("/v1/responses", json={**BODY, "stream": False})).json()

    for response in (found[-1]["response"], whole):
        (item,) = response["output"]
        assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
        assert item["input"] == "a\nb"


async def test_simultaneous_tool_calls_are_all_complete():
    at_once = [
        ToolCallPart(1, "first", "look", "{}"),
        ToolCalls((ToolCall("look", "{}", "first"),)),
        ToolCallPart(1, "second", "look", "{}"),
        ToolCalls((ToolCall("look", "{}", "second"),)),
        Finished(FinishReason.TOOL_CALLS, 2),
    ]
    async with rig("a") as fabric:
        found = await events(fabric, at_once)
    output = found[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["completed", "completed"]
