"""Keywords of schemas that no node enforces are listed in the answer's header, in every dialect."""

import json

import pytest

from router.limits import IGNORED_HEADER_CHARS_MAX
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
SCHEMA = {
    "type": "object",
    "properties": {"tags": {"type": "array", "uniqueItems": True, "contains": {}}},
    "if": {},
}
NAMES = ("if", "uniqueItems", "contains")
LISTED = ", ".join(f"json_schema.{name}" for name in NAMES)
OF_TOOLS = ", ".join(f"tools.{name}" for name in NAMES)
USER = [{"role": "user", "content": "hi"}]
NAMED = {"name": "n", "schema": SCHEMA}
FORM = {"type": "json_schema", **NAMED}
FLAT = {"type": "function", "name": "look", "parameters": SCHEMA}
NESTED = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOOL = {"name": "look", "input_schema": SCHEMA}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES = [
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": NAMED}},
     LISTED),
    (CHAT, {"messages": USER, "guided_json": json.dumps(SCHEMA)}, LISTED),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": SCHEMA}}, LISTED),
    (RESPONSES, {"input": "hi", "text": {"format": FORM}}, LISTED),
    (MESSAGES, {"messages": USER, "max_tokens": 9, "output_config":
                {"format": {**FORM, "strict": False}}}, LISTED),
    (CHAT, {"messages": USER, "tools": [NESTED], "tool_choice": "required"}, OF_TOOLS),
    ("/v1/agents/mira/generate", {"messages": USER, "tools": [NESTED], "tool_choice": "required"},
     OF_TOOLS),
    (RESPONSES, {"input": "hi", "tools": [FLAT], "tool_choice": "required"}, OF_TOOLS),
    (MESSAGES, {"messages": USER, "max_tokens": 9, "tools": [TOOL], "tool_choice":
                {"type": "any"}}, OF_TOOLS),
    (CHAT, {"messages": USER, "tools": [NESTED]}, None),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "listed"), BODIES, ids=str)
async def test_unenforced_schema_keywords_are_listed(path, body, listed):
    async with rig("a") as fabric:
        answer = await fabric.http().post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-macfabric-ignored") == listed


async def test_unenforced_keywords_are_listed_for_continued_response():
    async with rig("a") as fabric:
        first = await fabric.http().post(RESPONSES, json={"model": MODEL, "input": "hi"})
        body = {"model": MODEL, "input": "hi", "previous_response_id": first.json()["id"]}
        more = {"text": {"format": FORM}, "tools": [FLAT], "tool_choice": "required"}
        answer = await fabric.http().post(RESPONSES, json={**body, **more})
    listed = answer.headers["x-macfabric-ignored"].split(", ")
    assert sorted(listed) == sorted(f"{LISTED}, {OF_TOOLS}".split(", "))


async def test_ignored_header_is_bounded_for_hostile_schema():
    schema = {"type": "object", **{f"key\r\n{number}": 1 for number in range(400)}}
    async with rig("a") as fabric:
        body = {"model": MODEL, "messages": USER, "guided_json": schema}
        answer = await fabric.http().post(CHAT, json=body)
    header = answer.headers["x-macfabric-ignored"]
    assert len(header) < IGNORED_HEADER_CHARS_MAX + 20
    assert header.startswith("json_schema.key??0, ")
    assert header.endswith(" more")
