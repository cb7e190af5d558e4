"""The official OpenAI SDK's Responses against real nodes: chains, tools, streams, erasure."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.local_fabric import LocalFabric, local_fabric

FACT = "The vault code of Mira is otter lantern quartz."
CONTEXT_TOKENS = 1_400
ASK = "The vault code of Mira is"
RULES = "You remember what you are told. " * 40
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks somewhere.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}
USUAL = {"model": "recall", "temperature": 0, "max_output_tokens": 32, "instructions": RULES}

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFabric]:
    folder: Path = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "only", context_tokens_max=CONTEXT_TOKENS) as instance:
        yield instance


def test_response_chain_is_one_warm_agent(fabric):
    client = fabric.openai
    first = client.responses.create(**USUAL, input=FACT)
    raw = client.responses.with_raw_response.create(
        **USUAL, input=ASK, previous_response_id=first.id
    )
    second = raw.parse()
    third = client.responses.create(**USUAL, input=ASK, previous_response_id=second.id)

    assert second.output_text.strip().startswith("otter lantern quartz")
    assert raw.headers["x-macfabric-cache"] == "hot"
    for before, after in ((first, second), (second, third)):
        reused = after.usage.input_tokens_details.cached_tokens
        assert reused >= before.usage.input_tokens > 100
        assert after.usage.input_tokens - reused < 60
    agents = [agent["id"] for agent in fabric.http.get("/v1/agents").json()["data"]]
    assert agents == [raw.headers["x-macfabric-agent"]]

    # Continuing the first response starts another conversation, which leaves this one unchanged.
    other = client.responses.create(**USUAL, input=ASK, previous_response_id=first.id)
    assert other.output_text == second.output_text
    assert other.usage.input_tokens_details.cached_tokens > 100
    assert len(fabric.http.get("/v1/agents").json()["data"]) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_tool_result_continues_the_conversation(fabric, streams):
    client, tools = fabric.openai, [LOOK, {"type": "web_search"}]
    items = [
        {"role": "system", "content": f"To see say {CALL}"},
        {"role": "user", "content": "To see say"},
    ]
    if streams:
        with client.responses.stream(**USUAL, input=items, tools=tools, store=False) as stream:
            done = stream.get_final_response()
    else:
        done = client.responses.create(**USUAL, input=items, tools=tools, store=False)
    call = done.output[-1]

    assert (call.type, call.name, call.arguments) == ("function_call", "look", '{"at": "the sky"}')

    items += [
        *done.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": FACT},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": ASK},
    ]
    raw = client.responses.with_raw_response.create(**USUAL, input=items, tools=tools)

    assert raw.parse().output_text.strip().startswith("otter lantern quartz")
    assert raw.headers["x-macfabric-cache"] == "hot"
    assert raw.headers["x-macfabric-ignored"] == "web_search"


def test_responses_of_erased_agent_are_gone(fabric):
    client = fabric.openai
    raw = client.responses.with_raw_response.create(**USUAL, input=FACT + " Really.")
    done, agent = raw.parse(), raw.headers["x-macfabric-agent"]
    assert client.responses.retrieve(done.id).output == done.output

    assert fabric.http.delete(f"/v1/agents/{agent}").status_code == 200

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)


def test_context_overflow_error_has_wording_that_clients_match(fabric):
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        fabric.openai.responses.create(**USUAL, input="wild geese " * 20_000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.nightly
def test_unlimited_answer_fills_the_context(fabric):
    done = fabric.openai.chat.completions.create(
        model="recall",
        messages=[{"role": "user", "content": FACT}],
        extra_body={"ignore_eos": True},
    )

    assert done.usage.completion_tokens > 1_024
    assert done.usage.total_tokens == CONTEXT_TOKENS
    assert done.choices[0].finish_reason == "length"


def test_answer_matches_requested_schema(fabric):
    form = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    with fabric.openai.responses.stream(
        **USUAL, input="Any colour?", text={"format": form}
    ) as stream:
        done = stream.get_final_response()

    assert json.loads(done.output_text)["colour"] in ("red", "blue")
