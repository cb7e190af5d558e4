"""Context clearing through Anthropic's own SDK."""

import anthropic
import pytest

from router.limits import CONTEXT_EDITS_MAX
from router.policies.clear_tool_uses import CLEARED
from tests.router.counting_node import CountingNode
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
BETA = ["context-management-2025-06-27"]
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "bash")]
USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
RESULT = "r" * 1000


def use(n, name="read"):
    uses = [
        {"type": "thinking", "thinking": f"thought {n}", "signature": ""},
        {"type": "tool_use", "id": f"c{n}", "name": name, "input": {"path": f"file {n}"}},
    ]
    results = [{"type": "tool_result", "tool_use_id": f"c{n}", "content": RESULT}]
    return [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]


def loop(*names):
    messages = [{"role": "user", "content": "go"}]
    for n, name in enumerate(names):
        messages += use(n, name)
    return messages


def request_body(*edits, messages=None, **more):
    return {
        "model": MODEL,
        "messages": messages or loop(*["read"] * 6),
        "tools": TOOLS,
        "betas": BETA,
        "context_management": {"edits": list(edits)},
        **more,
    }


def results(request):
    return ["".join(m.texts) for m in request.messages if m.role == "tool"]


def edit(**more):
    return {"type": USES, "trigger": {"type": "tool_uses", "value": 1}, **more}


async def test_old_tool_results_are_cleared_and_reported():
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        client = fabric.anthropic()
        body = request_body(edit(), max_tokens=9)
        raw = await client.beta.messages.with_raw_response.create(**body)
        whole = await raw.parse()
        async with client.beta.messages.stream(**body) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()

    for request in node.requests:
        assert results(request) == [CLEARED] * 3 + [RESULT] * 3, "three are kept by default"
        first = next(use for message in request.messages for use in message.uses)
        assert first.arguments == {"path": "file 0"}
    for done in (whole, streamed):
        (applied,) = done.context_management.applied_edits
        assert applied.type == USES
        assert applied.cleared_tool_uses == 3
        assert applied.cleared_input_tokens == 3 * (1000 - len(CLEARED))
    delta = next(event for event in events if event.type == "message_delta")
    assert delta.context_management.applied_edits[0].cleared_tool_uses == 3
    assert raw.headers["x-macfabric-policies"] == f"{USES}=3"
    assert "x-macfabric-ignored" not in raw.headers


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"keep": {"type": "tool_uses", "value": 1}}, "     r"),
        (
            {"keep": {"type": "tool_uses", "value": 0}},
            "     r",
        ),  # the model has not read the last one
        ({"keep": {"type": "tool_uses", "value": 9}}, "rrrrrr"),
        ({"exclude_tools": ["bash"]}, " b rrr"),
        ({"trigger": {"type": "tool_uses", "value": 5}}, "   rrr"),
        ({"trigger": {"type": "tool_uses", "value": 6}}, "rrrrrr"),
        ({"trigger": {"type": "input_tokens", "value": 6_000}}, "   rrr"),
        ({"trigger": {"type": "input_tokens", "value": 7_000}}, "rrrrrr"),
        ({"trigger": None}, "rrrrrr"),
        ({"clear_at_least": {"type": "input_tokens", "value": 2_000}}, "   rrr"),
        ({"clear_at_least": {"type": "input_tokens", "value": 3_000}}, "rrrrrr"),
    ],
)
async def test_clear_tool_uses_honors_trigger_keep_and_exclude(more, kept):
    names = ["bash" if at == 1 else "read" for at in range(6)]
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        body = request_body(edit(**more), messages=loop(*names), max_tokens=9)
        done = await fabric.anthropic().beta.messages.create(**body)

    texts = results(node.requests[0])
    assert "".join(" " if text == CLEARED else "x" for text in texts) == "".join(
        " " if each == " " else "x" for each in kept
    )
    count = kept.count(" ")
    applied = done.context_management.applied_edits
    assert [each.cleared_tool_uses for each in applied] == ([count] if count else [])


@pytest.mark.parametrize(
    ("inputs", "left"),
    [
        (True, ["", "", "", "file 3", "file 4", "file 5"]),
        (["bash"], ["file 0", "", "file 2", "file 3", "file 4", "file 5"]),
        (False, [f"file {n}" for n in range(6)]),
    ],
)
async def test_clear_tool_inputs_option_clears_inputs(inputs, left):
    names = ["bash" if at == 1 else "read" for at in range(6)]
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        body = request_body(edit(clear_tool_inputs=inputs), messages=loop(*names), max_tokens=9)
        await fabric.anthropic().beta.messages.create(**body)

    uses = [use for message in node.requests[0].messages for use in message.uses]
    assert [use.arguments.get("path", "") for use in uses] == left


async def test_short_prompt_is_not_counted():
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        await fabric.anthropic().beta.messages.create(**request_body({"type": USES}, max_tokens=9))
    assert node.counted == []


@pytest.mark.parametrize(
    ("keep", "cleared", "left"),
    [
        (None, 2, [None, None, "thought 2"]),
        ({"type": "thinking_turns", "value": 2}, 1, [None, "thought 1", "thought 2"]),
        ("all", 0, ["thought 0", "thought 1", "thought 2"]),
        ({"type": "all"}, 0, ["thought 0", "thought 1", "thought 2"]),
    ],
)
async def test_clear_thinking_removes_thoughts_of_old_turns(keep, cleared, left):
    messages = []
    for n in range(3):
        messages += [{"role": "user", "content": f"question {n}"}, *use(n)]
    clearing = {"type": THINKING, **({"keep": keep} if keep else {})}
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        body = request_body(clearing, messages=messages, max_tokens=9)
        done = await fabric.anthropic().beta.messages.create(**body)

    answers = [m for m in node.requests[0].messages if m.role == "assistant"]
    assert [m.reasoning for m in answers] == left
    assert [m.is_stripped for m in answers] == [each is None for each in left]
    edits = [
        (each.type, each.cleared_thinking_turns, each.cleared_input_tokens)
        for each in done.context_management.applied_edits
    ]
    assert edits == ([(THINKING, cleared, cleared * len("thought 0"))] if cleared else [])


async def test_count_tokens_counts_prompt_after_clearing():
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        client = fabric.anthropic()
        counted = await client.beta.messages.count_tokens(**request_body(edit()))
        plain = await client.beta.messages.count_tokens(model=MODEL, messages=loop("read"))

    original = counted.context_management.original_input_tokens
    assert original - counted.input_tokens == 3 * (1000 - len(CLEARED))
    assert plain.context_management is None
    assert node.requests == []


async def test_unknown_edits_are_listed_as_ignored():
    node = CountingNode("node-a")
    async with rig(nodes=[node]) as fabric:
        edits = [{"type": "compact_20260112"}, edit()]
        raw = await fabric.anthropic().beta.messages.with_raw_response.create(
            **request_body(*edits, max_tokens=9)
        )
        done = await raw.parse()

    assert raw.headers["x-macfabric-ignored"] == "context_management.edits[0]"
    assert len(done.context_management.applied_edits) == 1


async def test_response_omits_context_management_without_edits():
    async with rig("a") as fabric:
        done = await fabric.anthropic().beta.messages.create(
            model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        )
    assert done.context_management is None


@pytest.mark.parametrize(
    ("management", "param"),
    [
        ([], "context_management"),
        ({"edits": {}}, "context_management.edits"),
        ({"edits": [1]}, "context_management.edits[0]"),
        ({"edits": [{}]}, "context_management.edits[0].type"),
        ({"edits": [edit()] * (CONTEXT_EDITS_MAX + 1)}, "context_management.edits"),
        ({"edits": [edit(trigger={"type": "days", "value": 1})]}, "edits[0].trigger.type"),
        ({"edits": [edit(trigger={"type": "tool_uses"})]}, "edits[0].trigger.value"),
        ({"edits": [edit(trigger={"type": "tool_uses", "value": 0})]}, "edits[0].trigger.value"),
        ({"edits": [edit(keep={"type": "input_tokens", "value": 1})]}, "edits[0].keep.type"),
        ({"edits": [edit(keep={"type": "tool_uses", "value": -1})]}, "edits[0].keep.value"),
        ({"edits": [edit(clear_at_least=5)]}, "edits[0].clear_at_least"),
        ({"edits": [edit(exclude_tools="read")]}, "edits[0].exclude_tools"),
        ({"edits": [edit(exclude_tools=[1])]}, "edits[0].exclude_tools"),
        ({"edits": [edit(clear_tool_inputs="all")]}, "edits[0].clear_tool_inputs"),
        ({"edits": [{"type": THINKING, "keep": "some"}]}, "edits[0].keep"),
        ({"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}]}, "keep"),
    ],
)
async def test_invalid_edit_is_rejected_with_its_parameter(management, param):
    async with rig("a") as fabric:
        client = fabric.anthropic()
        body = request_body(max_tokens=9) | {"context_management": management}
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.messages.create(**body)
        body.pop("max_tokens")
        with pytest.raises(anthropic.BadRequestError):
            await client.beta.messages.count_tokens(**body)
    assert param in caught.value.message
    assert caught.value.body["error"]["type"] == "invalid_request_error"
