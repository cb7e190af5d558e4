"""The official Anthropic SDK against real nodes: answers, streams, tools, counts, errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest

from fabric.control.node_calls import Done, Flush
from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.services import call

FACT = "The vault code of Mira is otter lantern quartz."
ASK = "The vault code of Mira is"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
TOOL = {
    "name": "look",
    "description": "Looks somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFabric]:
    folder: Path = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "only") as instance:
        yield instance


@pytest.fixture(scope="module")
def client(fabric: LocalFabric) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fabric.url, api_key="none", max_retries=0) as sdk:
        yield sdk


def body(*contents: str, **more):
    """Build a body with alternating user and assistant messages."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {
        "model": "recall",
        "max_tokens": 32,
        "extra_body": {"temperature": 0},  # the present SDK has no constant for it
        "system": "You remember what you are told. " * 20,
        "messages": messages,
        **more,
    }


def test_second_turn_of_conversation_is_warm(client):
    first = client.messages.create(**body(FACT, "Noted.", ASK))
    answer = first.content[0].text
    raw = client.messages.with_raw_response.create(**body(FACT, "Noted.", ASK, answer, ASK))
    second = raw.parse()

    assert answer.strip().startswith("otter lantern quartz")
    assert second.content[0].text.strip().startswith("otter lantern quartz")
    assert raw.headers["x-macfabric-cache"] == "hot"
    assert raw.headers["x-macfabric-match"] == "extend"
    usage = second.usage
    assert usage.cache_read_input_tokens >= first.usage.input_tokens > 100
    assert usage.input_tokens < 40
    assert usage.cache_read_input_tokens == int(raw.headers["x-macfabric-cached-tokens"])


def test_stream_equals_whole_answer_and_stops_at_stop_sequence(client):
    whole = client.messages.create(**body(FACT, "Noted.", ASK))
    with client.messages.stream(**body(FACT, "Noted.", ASK)) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    stopped = client.messages.create(**body(FACT, "Noted.", ASK, stop_sequences=["quartz"]))
    cut = client.messages.create(**body(FACT, "Noted.", ASK, max_tokens=2))

    assert text == whole.content[0].text == streamed.content[0].text
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "quartz")
    assert "quartz" not in stopped.content[0].text
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


@pytest.mark.parametrize("streams", [False, True])
def test_tool_result_continues_the_conversation(client, streams):
    request_body = body("To see say", tools=[TOOL], system=f"To see say {CALL}")
    if streams:
        with client.messages.stream(**request_body) as stream:
            done = stream.get_final_message()
    else:
        done = client.messages.create(**request_body)
    use = done.content[-1]

    assert done.stop_reason == "tool_use"
    assert (use.type, use.name, use.input) == ("tool_use", "look", {"at": "the sky"})

    result = {"type": "tool_result", "tool_use_id": use.id, "content": FACT}
    request_body["messages"] += [
        {"role": "assistant", "content": done.content},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": ASK},
    ]
    raw = client.messages.with_raw_response.create(**request_body)

    assert raw.parse().content[0].text.strip().startswith("otter lantern quartz")
    assert raw.headers["x-macfabric-cache"] == "hot"


def test_counted_tokens_equal_used_tokens(client):
    request_body = body(FACT, "Noted.", ASK, tools=[TOOL])
    counted = client.messages.count_tokens(
        **{name: request_body[name] for name in ("model", "messages", "system", "tools")}
    )
    usage = client.messages.create(**request_body).usage

    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    longer = client.messages.count_tokens(
        model="recall", messages=[{"role": "user", "content": "wild geese " * 20_000}]
    )
    assert longer.input_tokens > 20_000, "prompts beyond the context must be counted, too"


def test_prompt_beyond_context_is_rejected(client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**body("wild geese " * 20_000))


def test_disconnect_mid_stream_stops_answer_and_keeps_prompt_cached(fabric, client):
    request_body = body(FACT, "Noted.", ASK, max_tokens=4_000, metadata={"user_id": "leaver"})
    with client.messages.stream(**request_body) as stream:
        for _ in stream.text_stream:
            break
    call(fabric.services["only"], Flush(), Done)  # waits for running turns
    again = client.messages.create(**request_body)

    assert again.usage.cache_read_input_tokens > 100


def test_first_request_of_coding_agent_is_accepted(client):
    """The request has a billing line, a late system message, betas, and breakpoints everywhere."""
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billing = "x-anthropic-billing-header: cc_version={}; cc_entrypoint=cli; cch=00000;"

    def body_for(version):
        return {
            "model": "recall",
            "max_tokens": 8_000,
            "system": [
                {"type": "text", "text": billing.format(version)},
                {"type": "text", "text": "You help with code.", **marked},
                {"type": "text", "text": "Be careful. " * 300, **marked},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>Today is.</system-reminder>"},
                        {"type": "text", "text": f"{FACT} {ASK}", **marked},
                    ],
                },
                {"role": "system", "content": "Answer in words."},
            ],
            "tools": [TOOL],
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": f'{{"session_id":"s-{version}"}}'},
            "extra_body": {
                "temperature": 1,
                "output_config": {"effort": "high"},
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
                },
            },
            "extra_headers": {"anthropic-beta": "claude-code-20250219,interleaved-thinking"},
        }

    with client.beta.messages.stream(**body_for("2.1.197")) as stream:
        stream.get_final_message()
    raw = client.beta.messages.with_raw_response.create(**body_for("2.1.198"))
    usage = raw.parse().usage

    assert usage.cache_read_input_tokens > 500, "a session or version changed the prefix"
    assert raw.headers["x-macfabric-ignored"] == "x-anthropic-billing-header"


def test_answer_matches_requested_schema(client):
    form = {"type": "json_schema", "schema": COLOUR}
    done = client.messages.create(**body("Any colour?", output_config={"format": form}))

    assert json.loads(done.content[0].text)["colour"] in ("red", "blue")
    assert done.stop_reason == "end_turn"
