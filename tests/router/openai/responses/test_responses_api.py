import asyncio
import json

import openai
import pytest

from fabric.errors import RetryLaterError
from fabric.limits import BODY_BYTES_MAX, COMPLETION_TOKENS_MAX
from fabric.settings import RouterSettings
from fabric.turn.generation import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolCalls,
)
from fabric.turn.messages import template_form
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, OTHER_KEY, rig, until

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
BODY = {"model": MODEL, "input": "say one two"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}
SPACE = {"type": "namespace", "name": "git", "description": "x", "tools": [{**LOOK, "name": "log"}]}
THOUGHT = [
    Delta(0, "h", reasoning=True),
    Delta(1, "m", reasoning=True),
    Delta(2, "\n\n"),
    Delta(3, "Let me "),
    Delta(4, "see."),
    ToolCalls(
        (
            ToolCall("look", '{"at": "sky"}', "abcdefgh1"),
            ToolCall("patch", '{"input": "*** Begin"}'),
            ToolCall("git__log", "{}"),
        )
    ),
    Finished(FinishReason.TOOL_CALLS, 9),
]


def template_messages(fabric, index=-1):
    """Return the template's input of the node's last turn."""
    return [template_form(message) for message in fabric["node-a"].requests[index].messages]


async def test_unstreamed_response_has_all_fields():
    async with rig("a") as fabric:
        done = await fabric.openai().responses.create(**BODY, instructions="be brief")
        request = fabric["node-a"].requests[0]
        messages = template_messages(fabric)

    assert (done.object, done.status, done.model) == ("response", "completed", MODEL)
    assert done.id.startswith("resp_")
    assert done.output_text == "<system>be brief<user>say one two "
    assert [item.type for item in done.output] == ["message"]
    assert done.output[0].status == "completed"
    assert done.usage.input_tokens == len("<system>be brief<user>say one two")
    assert done.usage.output_tokens == 4
    assert done.usage.total_tokens == done.usage.input_tokens + 4
    assert done.usage.input_tokens_details.cached_tokens == 0
    assert done.usage.output_tokens_details.reasoning_tokens == 0
    assert (done.instructions, done.tool_choice, done.tools) == ("be brief", "auto", [])
    assert request.sampling.max_tokens == COMPLETION_TOKENS_MAX
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say one two"},
    ]


async def test_stream_events_are_numbered_and_ordered():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = THOUGHT
        body = {**BODY, "stream": True, "tools": [LOOK, PATCH, SPACE]}
        answer = await fabric.http().post(PATH, json=body)

    events = []
    for part in answer.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *(kind.replace("function_call_arguments", "custom_tool_call_input") for kind in call),
        *call,
        "completed",
    ]
    done = events[-1]["response"]
    assert done["output"] == [e["item"] for e in events if e["type"].endswith("item.done")]
    indexes = [e["output_index"] for e in events if e["type"].endswith("item.added")]
    assert indexes == [0, 1, 2, 3, 4]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done["output"][event["output_index"]]["id"]


SUMMARIES = ["auto", "concise", "detailed"]


async def test_reasoning_summary_events_carry_the_thought():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = THOUGHT
        client, more = fabric.openai(), {"tools": [LOOK, PATCH, SPACE]}
        stream = await client.responses.create(
            **BODY, **more, reasoning={"summary": "auto"}, stream=True
        )
        events = [event async for event in stream]

    thought = [event for event in events if getattr(event, "output_index", None) == 0]
    assert [event.type.removeprefix("response.") for event in thought] == [
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]
    assert {event.summary_index for event in thought[1:-1]} == {0}
    assert {event.item_id for event in thought[1:-1]} == {thought[0].item.id}
    assert "".join(event.delta for event in thought[2:4]) == "hm"
    assert (thought[4].text, thought[5].part.text) == ("hm", "hm")
    assert thought[5].part.type == thought[1].part.type == "summary_text"
    done = events[-1].response.output[0]
    assert done == thought[-1].item
    assert [(part.type, part.text) for part in done.summary] == [("summary_text", "hm")]
    assert not any("reasoning_text" in event.type for event in events)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("field", ["summary", "generate_summary"])
@pytest.mark.parametrize("value", [*SUMMARIES, None, "none"])
async def test_reasoning_summary_is_sent_only_on_request(streams, field, value):
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = THOUGHT
        client, more = fabric.openai(), {"reasoning": {field: value}}
        if streams:
            async with client.responses.stream(**BODY, **more) as stream:
                done = await stream.get_final_response()
        else:
            done = await client.responses.create(**BODY, **more)
        items = [{"role": "user", "content": "x"}, done.output[0].model_dump(exclude_unset=True)]
        await client.responses.create(model=MODEL, input=[*items, *items[:1]])
        sent_back = template_messages(fabric)
        await client.responses.create(model=MODEL, input="x", previous_response_id=done.id)
        continued = template_messages(fabric)

    thought = done.output[0]
    is_summary = value in SUMMARIES
    assert [part.text for part in thought.summary] == (["hm"] if is_summary else [])
    assert [part.text for part in thought.content or []] == ([] if is_summary else ["hm"])
    assert sent_back[1]["reasoning_content"] == continued[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize("streams", [False, True])
async def test_sdk_reads_reasoning_text_and_calls(streams):
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = THOUGHT
        client, tools = fabric.openai(), [LOOK, PATCH, SPACE, {"type": "web_search"}]
        if streams:
            async with client.responses.stream(**BODY, tools=tools) as stream:
                done = await stream.get_final_response()
        else:
            done = await client.responses.create(**BODY, tools=tools)
        request = fabric["node-a"].requests[0]

    thought, message, look, patch, log = done.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert message.content[0].text.strip() == "Let me see."
    assert (look.type, look.name, look.arguments) == ("function_call", "look", '{"at": "sky"}')
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin")
    assert (log.name, log.namespace, log.arguments) == ("log", "git", "{}")
    assert look.call_id == "abcdefgh1", "the model's own"
    assert len({look.call_id, patch.call_id, log.call_id}) == 3
    assert done.usage.output_tokens_details.reasoning_tokens == 2
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["look", "patch", "git__log"]
    assert request.tools[1]["function"]["parameters"]["required"] == ["input"]


async def test_output_items_can_be_sent_back_unchanged():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = THOUGHT
        client, tools = fabric.openai(), [LOOK, PATCH, SPACE]
        done = await client.responses.create(
            **BODY, tools=tools, store=False, include=["reasoning.encrypted_content"]
        )
        outputs = [
            {
                "type": f"{item.type}_output",
                "call_id": item.call_id,
                "output": [{"type": "input_text", "text": f"result {index}"}],
            }
            for index, item in enumerate(done.output[2:])
        ]
        items = [{"role": "user", "content": BODY["input"]}, *done.output, *outputs]
        await client.responses.create(model=MODEL, input=items, tools=tools)
        whole = template_messages(fabric)
        # Some clients keep only the encrypted content of a thought.
        items[1] = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": done.output[0].encrypted_content,
        }
        await client.responses.create(model=MODEL, input=items, tools=tools)
        sealed = template_messages(fabric)

    assert whole == sealed
    assert [message["role"] for message in whole] == ["user", "assistant", "tool", "tool", "tool"]
    assert whole[1]["reasoning_content"] == "hm"
    assert whole[1]["content"].strip() == "Let me see."
    called = [use["function"] for use in whole[1]["tool_calls"]]
    assert called == [
        {"name": "look", "arguments": {"at": "sky"}},
        {"name": "patch", "arguments": {"input": "*** Begin"}},
        {"name": "git__log", "arguments": {}},
    ]
    assert [use["id"] for use in whole[1]["tool_calls"]] == [
        message["tool_call_id"] for message in whole[2:]
    ]
    assert [message["content"] for message in whole[2:]] == ["result 0", "result 1", "result 2"]


async def test_response_continues_from_stored_response():
    async with rig("a") as fabric:
        client = fabric.openai()
        first = await client.responses.create(**BODY, instructions="be brief", metadata={"a": "b"})
        raw = await client.responses.with_raw_response.create(
            model=MODEL, input="and three", previous_response_id=first.id, instructions="be long"
        )
        second = raw.parse()
        messages = template_messages(fabric)
        third = await client.responses.create(
            model=MODEL, input="and four", previous_response_id=second.id
        )
        agents = [request.identity.agent for request in fabric["node-a"].requests]
        branch = await client.responses.with_raw_response.create(
            model=MODEL, input="or five", previous_response_id=first.id
        )

    assert messages == [
        {"role": "system", "content": "be long"},
        {"role": "user", "content": "say one two"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and three"},
    ]
    assert second.previous_response_id == first.id
    assert third.usage.input_tokens > second.usage.input_tokens - len("be long")
    assert agents[1] == agents[2] == raw.headers["x-macfabric-agent"]
    assert branch.headers["x-macfabric-agent"] != raw.headers["x-macfabric-agent"]


async def test_stored_response_is_visible_to_its_tenant_only():
    settings = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY})
    async with rig("a", settings=settings) as fabric:
        mine, other = fabric.openai(KEY), fabric.openai(OTHER_KEY)
        done = await mine.responses.create(**BODY)
        again = await mine.responses.retrieve(done.id)
        stored_items = await mine.responses.input_items.list(done.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(done.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await other.responses.create(**BODY, previous_response_id=done.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(done.id)
        await mine.responses.delete(done.id)
        with pytest.raises(openai.NotFoundError):
            await mine.responses.retrieve(done.id)
        unkept = await mine.responses.create(**BODY, store=False)
        with pytest.raises(openai.NotFoundError):
            await mine.responses.retrieve(unkept.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await mine.responses.create(**BODY, previous_response_id=unkept.id)

    assert again == done
    assert stored_items.data[0].content[0].text == BODY["input"]
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_item_reference_stands_for_stored_item():
    async with rig("a") as fabric:
        client = fabric.openai()
        first = await client.responses.create(**BODY)
        items = [
            {"role": "user", "content": BODY["input"]},
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "and?"},
        ]
        await client.responses.create(model=MODEL, input=items)
        messages = template_messages(fabric)
        items[1]["id"] = "msg_none"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input=items)

    assert messages[1] == {"role": "assistant", "content": first.output_text}
    assert caught.value.param == "input[1].id"


async def test_erasing_agent_deletes_its_responses():
    async with rig("a") as fabric:
        client, http = fabric.openai(), fabric.http()
        kept = await client.responses.create(**BODY, extra_headers={"x-agent-id": "ivan"})
        gone = await client.responses.create(**BODY, extra_headers={"x-agent-id": "mira"})
        erased = await http.delete("/v1/agents/mira")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone.id)
        assert (await client.responses.retrieve(kept.id)).id == kept.id

    assert erased.status_code == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_truncated_response_is_incomplete(streams):
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [Delta(0, "on"), Finished(FinishReason.LENGTH, 1)]
        client = fabric.openai()
        if streams:
            stream = await client.responses.create(**BODY, stream=True, max_output_tokens=1)
            events = [event async for event in stream]
            assert events[-1].type == "response.incomplete"
            done = events[-1].response
        else:
            done = await client.responses.create(**BODY, max_output_tokens=1)

    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert done.output[0].status == "incomplete"
    assert done.max_output_tokens == 1


async def test_mid_stream_error_is_the_last_event():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            Delta(0, "on"),
            Failed(500, "engine_failed", "it broke"),
        ]
        client = fabric.openai()
        events = [event async for event in await client.responses.create(**BODY, stream=True)]
        failed = events[-1]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(failed.response.id)

    assert failed.type == "response.failed"
    assert failed.sequence_number == len(events) - 1
    assert (failed.response.status, failed.response.error.message) == ("failed", "it broke")


async def test_errors_before_first_event_have_openai_shape():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.refuse = RetryLaterError("no", retry_after_s=3.0)
        with pytest.raises(openai.InternalServerError):
            await fabric.openai().responses.create(**BODY, stream=True)
        missing = await fabric.http().get(f"{PATH}/resp_x/nothing")

    assert missing.json()["error"]["code"] == "unknown_url"


async def test_logprobs_are_returned_on_request():
    token = TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.5)))
    async with rig("a") as fabric:
        events = [Delta(0, "a", logprobs=(token,)), Finished(FinishReason.STOP, 1)]
        fabric["node-a"].behaviour.events = events
        client, include = fabric.openai(), ["message.output_text.logprobs"]
        done = await client.responses.create(**BODY, include=include, top_logprobs=2)
        async with client.responses.stream(**BODY, include=include, top_logprobs=2) as stream:
            streamed = await stream.get_final_response()
        request = fabric["node-a"].requests[0]

    assert request.sampling.logprobs == 2
    for each in (done, streamed):
        token_logprob = each.output[0].content[0].logprobs[0]
        assert (token_logprob.token, token_logprob.logprob) == ("a", -0.5)
        assert [other.token for other in token_logprob.top_logprobs] == ["a", "b"]


async def test_disconnected_client_cancels_turn():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.events = [Delta(i, "word ") for i in range(500)]
        node.behaviour.delay_s = 0.01
        async with fabric.openai().responses.stream(**BODY) as stream:
            async for _ in stream:
                break
        await until(lambda: node.cancelled == 1)
        await asyncio.sleep(0)


async def test_ignored_header_is_sanitized():
    async with rig("a") as fabric:
        tools = [{"type": "web_search\u20ac\r\nx-more: 1"}]
        answer = await fabric.http().post(PATH, json={**BODY, "tools": tools})

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-ignored"] == "web_search???x-more: 1"
    assert "x-more" not in answer.headers


async def test_item_references_count_toward_body_limit():
    async with rig("a") as fabric:
        text = "x" * 4_096
        fabric["node-a"].behaviour.events = [Delta(0, text), Finished(FinishReason.STOP, 1)]
        first = await fabric.openai().responses.create(**BODY)
        named = {"type": "item_reference", "id": first.output[0].id}
        many = [named] * (BODY_BYTES_MAX // len(text))
        answer = await fabric.http().post(PATH, json={"model": MODEL, "input": many})
        requests_count = len(fabric["node-a"].requests)

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert requests_count == 1
