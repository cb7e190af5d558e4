"""Structured answers through the official SDK match their format, whole and streamed."""

import json
from enum import StrEnum

import jsonschema
import openai
import pydantic
import pytest

from tests.support.formats import PLACE
from tests.support.local_fabric import local_fabric

USER = [{"role": "user", "content": "The vault code of Mira is otter. The vault code of Mira is"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Kind(StrEnum):
    CITY = "city"
    RIVER = "river"


class Place(pydantic.BaseModel):
    kind: Kind
    size: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    with local_fabric(tmp_path_factory.mktemp("fabric"), "recall", "node-a", "node-b") as instance:
        yield instance


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 5}, {"tools": [TOOL]}], ids=str)
def test_answer_matches_its_schema(fabric, stream, more):
    answer = fabric.chat(USER, stream=stream, response_format=FORMAT, max_tokens=200, **more)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), PLACE)


def test_sdk_parses_structured_answer(fabric):
    parsed = fabric.openai.chat.completions.parse(
        model="recall", messages=USER, response_format=Place, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)


def test_next_turn_after_structured_answer_is_warm(fabric):
    first = fabric.chat(USER, "formatted", response_format=FORMAT, max_tokens=200)
    history = [*USER, {"role": "assistant", "content": first.text}, *USER]
    second = fabric.chat(history, "formatted", response_format={"type": "json_object"})
    assert (second.cache, second.match) == ("hot", "extend")
    assert second.cached_tokens > first.prompt_tokens
    fabric.migrate("formatted", "node-a" if second.node == "node-b" else "node-b")
    again = fabric.chat([*history, *USER], "formatted", response_format=FORMAT, max_tokens=200)
    assert again.node != second.node
    jsonschema.validate(json.loads(again.text), PLACE)


@pytest.mark.parametrize("limit", [1, 3])
def test_truncated_answer_has_finish_reason_length(fabric, limit):
    answer = fabric.chat(USER, response_format=FORMAT, max_tokens=limit)
    assert answer.finish_reason == "length"


def test_completion_matches_guided_choice(fabric):
    completion = fabric.openai.completions.create(
        model="recall", prompt="The", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert completion.choices[0].text in {"yes", "no"}


BAD = {
    "unknown keyword": {"type": "object", "not": {"type": "null"}},
    "no regex": {"type": "string", "pattern": "(a"},
    "nothing fits": {"type": "integer", "minimum": 3, "maximum": 2},
    "too many": {"enum": list(range(2_000))},
}


@pytest.mark.parametrize("name", BAD)
def test_unenforceable_format_is_a_bad_request_with_reason(fabric, name):
    before = len(fabric.http.get("/v1/agents").json()["data"])
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": BAD[name], "strict": True},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        fabric.chat(USER, "refused", response_format=form)
    error = caught.value
    assert (error.code, error.param, error.type) == (
        *("invalid_format", "response_format", "invalid_request_error"),
    )
    assert len(error.body["message"]) > 40
    assert len(fabric.http.get("/v1/agents").json()["data"]) == before
