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


def seen(made, index=-1):
    """Return what the template of the node's last turn was given."""
    return [template_form(message) for message in made["node-a"].requests[index].messages]


async def test_answers_whole():
    async with rig("a") as made:
        done = await made.openai().responses.create(**BODY, instructions="be brief")
        asked = made["node-a"].requests[0]
        messages = seen(made)

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
    assert asked.sampling.max_tokens == COMPLETION_TOKENS_MAX
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say one two"},
    ]


async def test_the_events_of_a_stream_come_numbered_in_their_order():
    async with rig("a") as made:
        made["node-a"].does.events = THOUGHT
        body = {**BODY, "stream": True, "tools": [LOOK, PATCH, SPACE]}
        answer = await made.http().post(PATH, json=body)

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


async def test_a_requested_summary_of_a_thought_is_the_thought_in_the_sdks_events():
    async with rig("a") as made:
        made["node-a"].does.events = THOUGHT
        client, more = made.openai(), {"tools": [LOOK, PATCH, SPACE]}
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
async def test_a_summary_comes_only_where_it_is_requested(streams, field, value):
    async with rig("a") as made:
        made["node-a"].does.events = THOUGHT
        client, more = made.openai(), {"reasoning": {field: value}}
        if streams:
            async with client.responses.stream(**BODY, **more) as stream:
                done = await stream.get_final_response()
        else:
            done = await client.responses.create(**BODY, **more)
        given = [{"role": "user", "content": "x"}, done.output[0].model_dump(exclude_unset=True)]
        await client.responses.create(model=MODEL, input=[*given, *given[:1]])
        sent_back = seen(made)
        await client.responses.create(model=MODEL, input="x", previous_response_id=done.id)
        continued = seen(made)

    thought = done.output[0]
    is_summary = value in SUMMARIES
    assert [part.text for part in thought.summary] == (["hm"] if is_summary else [])
    assert [part.text for part in thought.content or []] == ([] if is_summary else ["hm"])
    assert sent_back[1]["reasoning_content"] == continued[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize("streams", [False, True])
async def test_the_sdk_reads_thoughts_texts_and_calls(streams):
    async with rig("a") as made:
        made["node-a"].does.events = THOUGHT
        client, tools = made.openai(), [LOOK, PATCH, SPACE, {"type": "web_search"}]
        if streams:
            async with client.responses.stream(**BODY, tools=tools) as stream:
                done = await stream.get_final_response()
        else:
            done = await client.responses.create(**BODY, tools=tools)
        asked = made["node-a"].requests[0]

    thought, message, look, patch, log = done.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert message.content[0].text.strip() == "Let me see."
    assert (look.type, look.name, look.arguments) == ("function_call", "look", '{"at": "sky"}')
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin")
    assert (log.name, log.namespace, log.arguments) == ("log", "git", "{}")
    assert look.call_id == "abcdefgh1", "the model's own"
    assert len({look.call_id, patch.call_id, log.call_id}) == 3
    assert done.usage.output_tokens_details.reasoning_tokens == 2
    names = [tool["function"]["name"] for tool in asked.tools]
    assert names == ["look", "patch", "git__log"]
    assert asked.tools[1]["function"]["parameters"]["required"] == ["input"]


async def test_what_was_answered_can_be_sent_back_as_it_came():
    async with rig("a") as made:
        made["node-a"].does.events = THOUGHT
        client, tools = made.openai(), [LOOK, PATCH, SPACE]
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
        given = [{"role": "user", "content": BODY["input"]}, *done.output, *outputs]
        await client.responses.create(model=MODEL, input=given, tools=tools)
        whole = seen(made)
        # Some clients keep no more of a thought than what they cannot read.
        given[1] = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": done.output[0].encrypted_content,
        }
        await client.responses.create(model=MODEL, input=given, tools=tools)
        sealed = seen(made)

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


async def test_an_answer_goes_on_from_a_stored_one():
    async with rig("a") as made:
        client = made.openai()
        first = await client.responses.create(**BODY, instructions="be brief", metadata={"a": "b"})
        raw = await client.responses.with_raw_response.create(
            model=MODEL, input="and three", previous_response_id=first.id, instructions="be long"
        )
        second = raw.parse()
        messages = seen(made)
        third = await client.responses.create(
            model=MODEL, input="and four", previous_response_id=second.id
        )
        agents = [request.identity.agent for request in made["node-a"].requests]
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


async def test_what_is_stored_can_be_read_and_deleted_by_its_tenant_alone():
    settings = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY})
    async with rig("a", settings=settings) as made:
        mine, other = made.openai(KEY), made.openai(OTHER_KEY)
        done = await mine.responses.create(**BODY)
        again = await mine.responses.retrieve(done.id)
        given = await mine.responses.input_items.list(done.id)
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
        with pytest.raises(openai.BadRequestError) as told:
            await mine.responses.create(**BODY, previous_response_id=unkept.id)

    assert again == done
    assert given.data[0].content[0].text == BODY["input"]
    assert told.value.code == "previous_response_not_found"
    assert told.value.param == "previous_response_id"


async def test_an_item_may_be_named_instead_of_sent_again():
    async with rig("a") as made:
        client = made.openai()
        first = await client.responses.create(**BODY)
        given = [
            {"role": "user", "content": BODY["input"]},
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "and?"},
        ]
        await client.responses.create(model=MODEL, input=given)
        messages = seen(made)
        given[1]["id"] = "msg_none"
        with pytest.raises(openai.BadRequestError) as told:
            await client.responses.create(model=MODEL, input=given)

    assert messages[1] == {"role": "assistant", "content": first.output_text}
    assert told.value.param == "input[1].id"


async def test_an_erased_agents_responses_are_gone_with_it():
    async with rig("a") as made:
        client, http = made.openai(), made.http()
        kept = await client.responses.create(**BODY, extra_headers={"x-agent-id": "ivan"})
        gone = await client.responses.create(**BODY, extra_headers={"x-agent-id": "mira"})
        erased = await http.delete("/v1/agents/mira")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone.id)
        assert (await client.responses.retrieve(kept.id)).id == kept.id

    assert erased.status_code == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_is_cut_is_incomplete(streams):
    async with rig("a") as made:
        made["node-a"].does.events = [Delta(0, "on"), Finished(FinishReason.LENGTH, 1)]
        client = made.openai()
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


async def test_an_error_in_mid_stream_is_its_last_event():
    async with rig("a") as made:
        made["node-a"].does.events = [Delta(0, "on"), Failed(500, "engine_failed", "it broke")]
        client = made.openai()
        events = [event async for event in await client.responses.create(**BODY, stream=True)]
        failed = events[-1]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(failed.response.id)

    assert failed.type == "response.failed"
    assert failed.sequence_number == len(events) - 1
    assert (failed.response.status, failed.response.error.message) == ("failed", "it broke")


async def test_errors_before_the_first_event_have_openais_shape():
    async with rig("a") as made:
        made["node-a"].does.refuse = RetryLaterError("no", retry_after_s=3.0)
        with pytest.raises(openai.InternalServerError):
            await made.openai().responses.create(**BODY, stream=True)
        missing = await made.http().get(f"{PATH}/resp_x/nothing")

    assert missing.json()["error"]["code"] == "unknown_url"


async def test_log_probabilities_where_they_are_asked_for():
    token = TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.5)))
    async with rig("a") as made:
        events = [Delta(0, "a", logprobs=(token,)), Finished(FinishReason.STOP, 1)]
        made["node-a"].does.events = events
        client, include = made.openai(), ["message.output_text.logprobs"]
        done = await client.responses.create(**BODY, include=include, top_logprobs=2)
        async with client.responses.stream(**BODY, include=include, top_logprobs=2) as stream:
            streamed = await stream.get_final_response()
        asked = made["node-a"].requests[0]

    assert asked.sampling.logprobs == 2
    for each in (done, streamed):
        told = each.output[0].content[0].logprobs[0]
        assert (told.token, told.logprob) == ("a", -0.5)
        assert [other.token for other in told.top_logprobs] == ["a", "b"]


async def test_a_client_that_leaves_stops_its_node():
    async with rig("a") as made:
        node = made["node-a"]
        node.does.events = [Delta(i, "word ") for i in range(500)]
        node.does.delay_s = 0.01
        async with made.openai().responses.stream(**BODY) as stream:
            async for _ in stream:
                break
        await until(lambda: node.cancelled == 1)
        await asyncio.sleep(0)


async def test_what_is_ignored_is_told_as_a_header_may_be():
    async with rig("a") as made:
        tools = [{"type": "web_search\u20ac\r\nx-more: 1"}]
        answer = await made.http().post(PATH, json={**BODY, "tools": tools})

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-ignored"] == "web_search???x-more: 1"
    assert "x-more" not in answer.headers


async def test_a_short_name_does_not_stand_for_more_than_a_body_may_be():
    async with rig("a") as made:
        text = "x" * 4_096
        made["node-a"].does.events = [Delta(0, text), Finished(FinishReason.STOP, 1)]
        first = await made.openai().responses.create(**BODY)
        named = {"type": "item_reference", "id": first.output[0].id}
        many = [named] * (BODY_BYTES_MAX // len(text))
        answer = await made.http().post(PATH, json={"model": MODEL, "input": many})
        asked_count = len(made["node-a"].requests)

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert asked_count == 1
