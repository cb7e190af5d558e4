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
    with local_fabric(folder, "recall", "only") as made:
        yield made


@pytest.fixture(scope="module")
def client(fabric: LocalFabric) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fabric.url, api_key="none", max_retries=0) as made:
        yield made


def body(*said: str, **more):
    """Alternate user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return {
        "model": "recall",
        "max_tokens": 32,
        "extra_body": {"temperature": 0},  # the SDK of today has no name for it
        "system": "You remember what you are told. " * 20,
        "messages": messages,
        **more,
    }


def test_a_conversation_is_warm_at_its_second_turn(client):
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


def test_a_stream_says_the_same_and_ends_at_a_stop_sequence(client):
    whole = client.messages.create(**body(FACT, "Noted.", ASK))
    with client.messages.stream(**body(FACT, "Noted.", ASK)) as stream:
        said = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    stopped = client.messages.create(**body(FACT, "Noted.", ASK, stop_sequences=["quartz"]))
    cut = client.messages.create(**body(FACT, "Noted.", ASK, max_tokens=2))

    assert said == whole.content[0].text == streamed.content[0].text
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "quartz")
    assert "quartz" not in stopped.content[0].text
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_its_result_continues_the_conversation(client, streams):
    asked = body("To see say", tools=[TOOL], system=f"To see say {CALL}")
    if streams:
        with client.messages.stream(**asked) as stream:
            done = stream.get_final_message()
    else:
        done = client.messages.create(**asked)
    use = done.content[-1]

    assert done.stop_reason == "tool_use"
    assert (use.type, use.name, use.input) == ("tool_use", "look", {"at": "the sky"})

    result = {"type": "tool_result", "tool_use_id": use.id, "content": FACT}
    asked["messages"] += [
        {"role": "assistant", "content": done.content},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": ASK},
    ]
    raw = client.messages.with_raw_response.create(**asked)

    assert raw.parse().content[0].text.strip().startswith("otter lantern quartz")
    assert raw.headers["x-macfabric-cache"] == "hot"


def test_tokens_are_counted_as_they_are_used(client):
    asked = body(FACT, "Noted.", ASK, tools=[TOOL])
    counted = client.messages.count_tokens(
        **{name: asked[name] for name in ("model", "messages", "system", "tools")}
    )
    usage = client.messages.create(**asked).usage

    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    longer = client.messages.count_tokens(
        model="recall", messages=[{"role": "user", "content": "wild geese " * 20_000}]
    )
    assert longer.input_tokens > 20_000, "also beyond the context"


def test_a_prompt_beyond_the_context_is_told_so(client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**body("wild geese " * 20_000))


def test_a_client_that_leaves_in_mid_stream_stops_the_answer_and_keeps_the_prompt(fabric, client):
    asked = body(FACT, "Noted.", ASK, max_tokens=4_000, metadata={"user_id": "leaver"})
    with client.messages.stream(**asked) as stream:
        for _ in stream.text_stream:
            break
    call(fabric.services["only"], Flush(), Done)  # which waits for turns that run
    again = client.messages.create(**asked)

    assert again.usage.cache_read_input_tokens > 100


def test_what_a_coding_agent_sends(client):
    """Its first request: a billing line, a late system message, betas, breakpoints everywhere."""
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billing = "x-anthropic-billing-header: cc_version={}; cc_entrypoint=cli; cch=00000;"

    def asked(version):
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

    with client.beta.messages.stream(**asked("2.1.197")) as stream:
        stream.get_final_message()
    raw = client.beta.messages.with_raw_response.create(**asked("2.1.198"))
    usage = raw.parse().usage

    assert usage.cache_read_input_tokens > 500, "another session, and another version"
    assert raw.headers["x-macfabric-ignored"] == "x-anthropic-billing-header"


def test_an_answer_fits_the_schema_that_is_asked_for(client):
    form = {"type": "json_schema", "schema": COLOUR}
    done = client.messages.create(**body("Any colour?", output_config={"format": form}))

    assert json.loads(done.content[0].text)["colour"] in ("red", "blue")
    assert done.stop_reason == "end_turn"
