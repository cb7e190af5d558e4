import asyncio
import json

import anthropic
import pytest

from fabric.errors import OverloadedError, RejectedError, RetryLaterError
from fabric.settings import RouterSettings
from fabric.turn.generation import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    ToolCall,
    ToolCallPart,
    ToolCalls,
)
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, rig, until

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "say one two three"}]
BODY = {"model": MODEL, "max_tokens": 99, "messages": USER}
PATH = "/v1/messages"
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]
THOUGHT = [
    Delta(0, "h", reasoning=True),
    Delta(1, "m", reasoning=True),
    Delta(2, "\n\n"),
    Delta(3, "Let me "),
    Delta(4, "see."),
    ToolCalls((ToolCall("look", '{"at": "sky"}', "abcdefgh1"), ToolCall("look", "{}"))),
    Finished(FinishReason.TOOL_CALLS, 9),
]
THINKING = {"type": "enabled", "budget_tokens": 1024}


def events_of(answer):
    """Read a stream as (name, data) pairs."""
    found = []
    for part in answer.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_unstreamed_message_has_all_fields():
    async with rig("a") as fabric:
        done = await fabric.anthropic().messages.create(**BODY)

    assert (done.type, done.role, done.model) == ("message", "assistant", MODEL)
    assert done.id.startswith("msg_")
    assert [(block.type, block.text) for block in done.content] == [
        ("text", "<user>say one two three ")
    ]
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    assert done.usage.input_tokens == len("<user>say one two three")
    assert done.usage.output_tokens == 4
    assert done.usage.cache_read_input_tokens == 0
    assert done.usage.cache_creation_input_tokens == 0
    assert done._request_id.startswith("req_")


async def test_stream_events_arrive_in_api_order():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = THOUGHT
        body = {**BODY, "stream": True, "thinking": THINKING, "tools": TOOLS}
        answer = await fabric.http().post(PATH, json=body)

    events = events_of(answer)
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta"),
        "content_block_stop",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    started = [data for name, data in events if name == "content_block_start"]
    assert [each["index"] for each in started] == [0, 1, 2, 3]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        *("thinking_delta", "thinking_delta", "signature_delta"),
        *("text_delta", "text_delta", "input_json_delta", "input_json_delta"),
    ]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 9
    assert events[0][1]["message"]["content"] == []


@pytest.mark.parametrize("thinks", [True, False])
async def test_sdk_reads_same_message_streamed_and_unstreamed(thinks):
    options = {"thinking": THINKING} if thinks else {}
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = THOUGHT
        client = fabric.anthropic()
        whole = await client.messages.create(**BODY, tools=TOOLS, **options)
        async with client.messages.stream(**BODY, tools=TOOLS, **options) as stream:
            streamed = await stream.get_final_message()
        request = fabric["node-a"].requests[0]

    assert request.template_options["enable_thinking"] is thinks
    for done in (whole, streamed):
        kinds = [block.type for block in done.content]
        assert kinds == [*(["thinking"] if thinks else []), "text", "tool_use", "tool_use"]
        assert done.content[-2].input == {"at": "sky"}
        assert done.content[-1].input == {}
        assert done.content[-2].id == "abcdefgh1", "the model's own"
        assert done.content[-1].id.startswith("toolu_")
        assert done.content[-3].text.strip() == "Let me see."
        assert done.stop_reason == "tool_use"
        assert done.usage.output_tokens == 9
    if thinks:
        assert whole.content[0].thinking == streamed.content[0].thinking == "hm"
        assert whole.content[0].signature == streamed.content[0].signature != ""


PARTS = [
    Delta(0, "Let me see."),
    ToolCallPart(1, "first", "look"),
    ToolCallPart(2, "first", "", '{"at": '),
    ToolCallPart(3, "first", "", '"sky"}'),
    ToolCalls((ToolCall("look", '{"at": "sky"}', "first"),)),
    ToolCallPart(4, "second", "look", "{}"),
    ToolCalls((ToolCall("look", "{}", "second"),)),
    ToolCalls((ToolCall("look", "{}"), ToolCall("look", "{}"))),
    Finished(FinishReason.TOOL_CALLS, 9),
]


async def test_tool_calls_stream_as_they_are_generated():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = PARTS
        body = {**BODY, "stream": True, "tools": TOOLS}
        events = events_of(await fabric.http().post(PATH, json=body))

    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    parts = [delta["partial_json"] for delta in deltas if "partial_json" in delta]
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    stops = [data["index"] for name, data in events if name == "content_block_stop"]
    ids = [block.get("id") for block in starts]
    assert parts == ['{"at": ', '"sky"}', "{}", "{}", "{}"]
    assert ids[:3] == [None, "first", "second"]
    assert stops == [0, 1, 2, 3, 4]


async def test_truncated_tool_call_appears_once_streamed_and_unstreamed():
    arguments = '{"at": "sky", "days": [1, 2], "why": "the'
    cut = [
        *PARTS[:2],
        *(ToolCallPart(2, "first", "", char) for char in arguments),
        ToolCalls((ToolCall("look", arguments, "first", is_broken=True),)),
        Finished(FinishReason.LENGTH, 99, broken_calls=1),
    ]
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = cut
        client, body = fabric.anthropic(), {**BODY, "stream": True, "tools": TOOLS}
        whole = await client.messages.create(**BODY, tools=TOOLS)
        async with client.messages.stream(**BODY, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
        events = events_of(await fabric.http().post(PATH, json=body))

    for done in (whole, streamed):
        assert [block.type for block in done.content] == ["text", "tool_use"]
        assert done.content[1].input == {"at": "sky", "days": [1, 2]}
        assert done.stop_reason == "max_tokens"
    deltas = [data for name, data in events if name == "content_block_delta"]
    kinds = {(data["index"], data["delta"]["type"]) for data in deltas}
    assert kinds == {(0, "text_delta"), (1, "input_json_delta")}


async def test_blank_text_before_tool_calls_has_no_block():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [Delta(0, "\n\n"), *THOUGHT[5:]]
        client = fabric.anthropic()
        whole = await client.messages.create(**BODY, tools=TOOLS)
        async with client.messages.stream(**BODY, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()

    for done in (whole, streamed):
        assert [block.type for block in done.content] == ["tool_use", "tool_use"]


@pytest.mark.parametrize(
    ("finished", "max_tokens", "reason"),
    [
        (Finished(FinishReason.STOP, 1), 9, ("end_turn", None)),
        (Finished(FinishReason.STOP, 1, stop_string="END"), 9, ("stop_sequence", "END")),
        (Finished(FinishReason.LENGTH, 9), 9, ("max_tokens", None)),
        (Finished(FinishReason.LENGTH, 8), 9, ("model_context_window_exceeded", None)),
    ],
)
async def test_stop_reason_follows_finish_reason(finished, max_tokens, reason):
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [finished]
        client = fabric.anthropic()
        body = {**BODY, "max_tokens": max_tokens, "stop_sequences": ["END"]}
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()

    for done in (whole, streamed):
        assert (done.stop_reason, done.stop_sequence) == reason
        assert [(block.type, block.text) for block in done.content] == [("text", "")]


async def test_usage_splits_input_into_cached_and_newly_written_tokens():
    marked = [{"type": "text", "text": "say", "cache_control": {"type": "ephemeral"}}]
    async with rig("a") as fabric:
        client = fabric.anthropic()
        first = await client.messages.create(**BODY)
        grown = [*USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": marked}]
        raw = await client.messages.with_raw_response.create(**{**BODY, "messages": grown})
        second = await raw.parse()
    total = len("<user>say one two three<assistant>x<user>say")

    assert "x-macfabric-ignored" not in raw.headers
    assert raw.headers["x-macfabric-match"] == "extend"
    assert second.usage.cache_read_input_tokens == first.usage.input_tokens
    assert second.usage.cache_creation_input_tokens == total - first.usage.input_tokens
    assert second.usage.input_tokens == 0


async def test_max_tokens_zero_warms_prefix_cache():
    async with rig("a") as fabric:
        client = fabric.anthropic()
        warmed = await client.messages.create(**{**BODY, "max_tokens": 0})
        done = await client.messages.create(**BODY)
        request = fabric["node-a"].requests[0]

    assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
    assert warmed.usage.output_tokens == 0
    assert request.sampling.max_tokens == 1
    assert done.usage.cache_read_input_tokens == warmed.usage.input_tokens - 1


ERRORS = [
    (RejectedError("no", code="template_refused"), 400, "invalid_request_error", "no"),
    (OverloadedError("no", retry_after_s=7.2), 429, "rate_limit_error", "no node has room"),
    (RetryLaterError("no", retry_after_s=3.0), 529, "overloaded_error", "no"),
]


@pytest.mark.parametrize(("error", "status", "kind", "message"), ERRORS, ids=str)
async def test_node_error_maps_to_anthropic_type_and_status(error, status, kind, message):
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.refuse = error
        with pytest.raises(anthropic.APIStatusError) as caught:
            await fabric.anthropic().messages.create(**BODY)

    assert caught.value.status_code == status
    found = caught.value.body["error"].pop("message")
    assert found == message or found.startswith(f"{message} for")
    assert caught.value.body == {"type": "error", "error": {"type": kind}}
    if status != 400:
        assert int(caught.value.response.headers["retry-after"]) >= 3


async def test_router_errors_have_anthropic_shape():
    settings = RouterSettings(api_keys={"one": KEY}, loopback_without_key=False)
    async with rig("a", settings=settings, tended=False) as fabric:
        http, keyless = fabric.http(KEY), fabric.http(operates=False)
        answers = [
            await keyless.post(PATH, json=BODY),
            await keyless.post(PATH, json=BODY, headers={"x-api-key": "wrong"}),
            await http.post(PATH, content=b"{"),
            await http.post(PATH, json={**BODY, "model": "gpt"}),
            await http.get(PATH),
            await http.post(f"{PATH}/batches", json={}),
            await http.post("/v1/complete", json={}, headers={"anthropic-version": "2023-06-01"}),
            await http.post(PATH, content=b" " * ((32 << 20) + 1)),
        ]
        good = await keyless.post(PATH, json=BODY, headers={"x-api-key": KEY})

    assert [(a.status_code, a.json()["type"], a.json()["error"]["type"]) for a in answers] == [
        (401, "error", "authentication_error"),
        (401, "error", "authentication_error"),
        (400, "error", "invalid_request_error"),
        (404, "error", "not_found_error"),
        (405, "error", "invalid_request_error"),
        (404, "error", "not_found_error"),
        (404, "error", "not_found_error"),
        (413, "error", "request_too_large"),
    ]
    assert good.status_code == 200


async def test_context_overflow_error_has_wording_that_clients_match():
    async with rig("a") as fabric:
        refusal = RejectedError("it has 9 tokens", code="context_length_exceeded")
        fabric["node-a"].behaviour.refuse = refusal
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: it has 9 tokens"):
            await fabric.anthropic().messages.create(**BODY)


async def test_tool_runner_resends_whole_conversation():
    async def weather(city: str) -> str:
        """Tell the weather."""
        return f"sunny in {city}"

    async with rig("a") as fabric:
        call = ToolCall("weather", '{"city": "Paris"}')
        fabric["node-a"].behaviour.events = [
            ToolCalls((call,)),
            Finished(FinishReason.TOOL_CALLS, 1),
        ]
        tool = anthropic.beta_async_tool(weather)
        runner = fabric.anthropic().beta.messages.tool_runner(
            **BODY, tools=[tool], max_iterations=2
        )
        await runner.until_done()
        requests = fabric["node-a"].requests

    assert [m.role.value for m in requests[-1].messages] == ["user", "assistant", "tool"]
    assert requests[-1].tools


async def test_mid_stream_error_event_is_raised_by_sdk():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            Delta(0, "on"),
            Failed(500, "engine_failed", "it broke"),
        ]
        with pytest.raises(anthropic.APIStatusError, match="it broke"):
            async with fabric.anthropic().messages.stream(**BODY) as stream:
                await stream.get_final_message()


async def test_disconnected_client_cancels_turn():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.events = [Delta(i, "word ") for i in range(500)]
        node.behaviour.delay_s = 0.01
        async with fabric.anthropic().messages.stream(**BODY) as stream:
            async for _ in stream:
                break
        await until(lambda: node.cancelled == 1)
        await asyncio.sleep(0)


async def test_head_of_root_returns_200():
    async with rig("a") as fabric:
        answer = await fabric.http().head("/")

    assert (answer.status_code, answer.content) == (200, b"")
