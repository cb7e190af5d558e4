import asyncio
import json

import openai
import pytest

from fabric.turn.generation import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    ToolCalls,
)
from tests.router.fake_node import MODEL
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "say one two three"}]


async def test_unstreamed_chat_has_all_fields():
    async with rig("a") as fabric:
        done = await fabric.openai().chat.completions.create(model=MODEL, messages=USER)

    assert done.object == "chat.completion"
    assert done.id.startswith("chatcmpl-")
    assert done.model == MODEL
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == "<user>say one two three "
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].message.tool_calls is None
    assert done.choices[0].logprobs is None
    assert done.usage.prompt_tokens == len("<user>say one two three")
    assert done.usage.completion_tokens == 4
    assert done.usage.total_tokens == done.usage.prompt_tokens + 4
    assert done.usage.prompt_tokens_details.cached_tokens == 0


async def test_stream_sends_role_text_finish_reason_and_usage_in_order():
    async with rig("a") as fabric:
        stream = await fabric.openai().chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "<user>say one two three "
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_stream_without_usage_has_no_usage_chunk_and_ends_with_done():
    async with rig("a") as fabric:
        answer = await fabric.chat("hello", stream=True)

    lines = [line for line in answer.text.split("\n\n") if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line[6:]) for line in lines[:-1])


async def test_response_headers_report_agent_cache_and_match():
    async with rig("a") as fabric:
        cold = await fabric.chat("hello", agent="alice")
        warm = await fabric.chat("hello", "hi", "more", agent="alice", stream=True)
        fabric["node-a"].memory["default", "alice"].hot = False
        disk = await fabric.chat("hello", "hi", "more", agent="alice")

    assert cold.headers["x-macfabric-agent"] == "alice"
    assert cold.headers["x-macfabric-node"] == "node-a"
    assert cold.headers["x-macfabric-cache"] == "cold"
    assert cold.headers["x-macfabric-match"] == "none"
    assert cold.headers["x-macfabric-cached-tokens"] == "0"
    assert cold.headers["x-macfabric-epoch"] == "1"
    assert warm.headers["x-macfabric-cache"] == "hot"
    assert warm.headers["x-macfabric-match"] == "extend"
    assert warm.headers["x-macfabric-cached-tokens"] == str(len("<user>hello"))
    assert warm.headers["x-macfabric-match-reason"] == "11 characters in common"
    assert disk.headers["x-macfabric-cache"] == "disk"
    assert disk.headers["x-macfabric-match"] == "exact"
    assert disk.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert disk.headers["x-request-id"].startswith("req_")


async def test_tool_calls_are_equal_streamed_and_unstreamed():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    events = [
        Delta(0, "Let me see. "),
        ToolCalls((ToolCall("look", '{"at": "sky"}'), ToolCall("look", "{}"))),
        Finished(FinishReason.TOOL_CALLS, 9),
    ]
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = events
        client = fabric.openai()
        whole = await client.chat.completions.create(model=MODEL, messages=USER, tools=tools)
        async with client.chat.completions.stream(
            model=MODEL, messages=USER, tools=tools
        ) as stream:
            streamed = await stream.get_final_completion()
        request = fabric["node-a"].requests[0]

    assert request.tools == tools
    for done in (whole, streamed):
        choice = done.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see. "
        assert [call.function.name for call in choice.message.tool_calls] == ["look", "look"]
        assert choice.message.tool_calls[0].function.arguments == '{"at": "sky"}'
        assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_tool_calls_stream_as_they_are_generated():
    """An unstreamed answer, and the SDK's events of whole calls, contain each call once."""
    parts = [("first", "look", ""), ("first", "", '{"at": '), ("first", "", '"sky"}')]
    events = [
        Delta(0, "Let me see. "),
        *(ToolCallPart(i, *part) for i, part in enumerate(parts)),
        ToolCalls((ToolCall("look", '{"at": "sky"}', "first"),)),
        ToolCallPart(3, "second", "look", "{"),
        ToolCallPart(4, "second", "", "}"),
        ToolCalls((ToolCall("look", "{}", "second"),)),
        Finished(FinishReason.TOOL_CALLS, 9),
    ]
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = events
        client = fabric.openai()
        whole = await client.chat.completions.create(model=MODEL, messages=USER)
        async with client.chat.completions.stream(model=MODEL, messages=USER) as stream:
            streamed = await stream.get_final_completion()
        chunks = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        deltas = [c.choices[0].delta.tool_calls async for c in chunks if c.choices]

    for done in (whole, streamed):
        calls = done.choices[0].message.tool_calls
        assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
            ("first", "look", '{"at": "sky"}'),
            ("second", "look", "{}"),
        ]
    parts_streamed = [call for delta in deltas for call in delta or ()]
    assert [(c.index, c.id, c.function.arguments) for c in parts_streamed] == [
        (0, "first", ""), (0, None, '{"at": '), (0, None, '"sky"}'),
        (1, "second", "{"), (1, None, "}"),
    ]  # fmt: skip


async def test_truncated_tool_call_appears_once_streamed_and_unstreamed():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            ToolCallPart(0, "first", "look", '{"at": '),
            ToolCallPart(1, "first", "", '"the'),
            ToolCalls((ToolCall("look", '{"at": "the', "first", is_broken=True),)),
            Finished(FinishReason.LENGTH, 3, broken_calls=1),
        ]
        client = fabric.openai()
        done = await client.chat.completions.create(model=MODEL, messages=USER)
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        choices = [chunk.choices[0] async for chunk in stream if chunk.choices]

    whole, last = done.choices[0], choices[-1]
    (call,) = whole.message.tool_calls
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    assert (call.id, call.function.arguments) == ("first", '{"at": "the')
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert {part.index for part in parts} == {0}
    assert whole.message.content is None
    assert not any(choice.delta.content for choice in choices)
    for each in (whole, last):
        assert (each.finish_reason, each.macfabric) == ("length", {"broken_tool_calls": 1})


async def test_content_is_null_when_there_are_only_tool_calls():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            ToolCalls((ToolCall("look", "{}"),)),
            Finished(FinishReason.TOOL_CALLS, 3),
        ]
        done = await fabric.openai().chat.completions.create(model=MODEL, messages=USER)

    assert done.choices[0].message.content is None


async def test_reasoning_is_separate_from_content():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            Delta(0, "hm", reasoning=True),
            Delta(1, "yes"),
            Finished(FinishReason.LENGTH, 2),
        ]
        client = fabric.openai()
        whole = await client.chat.completions.create(model=MODEL, messages=USER)
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]

    assert whole.usage.completion_tokens_details.reasoning_tokens == 1
    assert whole.choices[0].message.reasoning_content == "hm"
    assert whole.choices[0].message.content == "yes"
    assert whole.choices[0].finish_reason == "length"
    assert [getattr(d, "reasoning_content", None) for d in deltas] == [None, "hm", None, None]


async def test_logprobs_are_returned_whole_and_streamed():
    token = TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.5)))
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            Delta(0, "a", logprobs=(token,)),
            Finished(FinishReason.STOP, 1),
        ]
        client = fabric.openai()
        whole = await client.chat.completions.create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=2, stream=True
        )
        chunks = [chunk async for chunk in stream]

    assert fabric["node-a"].requests[0].sampling.logprobs == 2
    first = whole.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [alternative.token for alternative in first.top_logprobs] == ["a", "b"]
    assert chunks[1].choices[0].logprobs.content[0].token == "a"


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_client_cancels_turn_on_node(stream):
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.delay_s = 0.05
        client = fabric.openai()
        words = [{"role": "user", "content": "word " * 500}]
        if stream:
            answer = await client.chat.completions.create(
                model=MODEL, messages=words, stream=True, max_tokens=500
            )
            await anext(aiter(answer))
            await answer.close()
        else:
            asking = asyncio.create_task(
                client.chat.completions.create(model=MODEL, messages=words, max_tokens=500)
            )
            await until(lambda: node.running)
            asking.cancel()
        await until(lambda: node.cancelled == 1)
        await until(lambda: fabric.fleet.ledger.turns("node-a") == 0)

        metrics = (await fabric.http().get("/metrics")).text
    assert node.finished == 0
    assert 'macfabric_requests_total{outcome="cancelled"} 1.0' in metrics


async def test_client_disconnect_before_first_event_cancels_turn():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.first_delay_s = 30
        asking = asyncio.create_task(fabric.chat("hello"))
        await until(lambda: node.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: fabric.fleet.ledger.turns("node-a") == 0)


async def test_stream_ends_with_error_when_node_breaks_off():
    async with rig("ab") as fabric:
        for node in fabric.nodes.values():
            node.behaviour.break_after = 3
        stream = await fabric.openai().chat.completions.create(
            model=MODEL, messages=USER, stream=True
        )
        seen = []

        async def read():
            async for chunk in stream:
                seen.append(chunk.choices[0].delta.content)  # noqa: PERF401 - the stream breaks off

        with pytest.raises(openai.APIError) as caught:
            await read()

    assert caught.value.code == "node_lost"
    assert "".join(seen) == "<user>say one "
    assert sum(len(node.requests) for node in fabric.nodes.values()) == 1, "no silent restart"


async def test_unstreamed_chat_fails_when_node_breaks_off():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.break_after = 3
        with pytest.raises(openai.InternalServerError) as caught:
            await fabric.openai().chat.completions.create(model=MODEL, messages=USER)

    assert caught.value.status_code == 503
    assert caught.value.code == "node_lost"


async def test_node_failure_ends_stream_with_its_code():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = [
            Delta(0, "x"),
            Failed(500, "engine_failed", "it broke"),
        ]
        answer = await fabric.chat("hello", stream=True)
        whole = await fabric.chat("hello")

    last = json.loads(answer.text.strip().split("\n\n")[-1][6:])
    assert last["error"] == {
        "message": "it broke",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "engine_failed"


async def test_slow_reader_does_not_block_others():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.behaviour.events = [Delta(i, "x" * 50_000) for i in range(400)]
        node.behaviour.events.append(Finished(FinishReason.STOP, 400))
        _, writer = await asyncio.open_connection("127.0.0.1", int(fabric.url.split(":")[2]))
        fabric.writers.append(writer)
        body = json.dumps({"model": MODEL, "messages": USER, "stream": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: node.running)
        await asyncio.sleep(0.3)
        assert node.finished == 0, "the client that does not read slows its node"
        node.behaviour.events = None
        quick = await fabric.chat("hello")
        writer.transport.abort()
        await until(lambda: node.cancelled == 1)

    assert quick.status_code == 200
