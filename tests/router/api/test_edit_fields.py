"""Edit fields of every dialect reach the node."""

import pytest

from fabric.codec import dump_json, from_plain, parse_json
from fabric.edit_mode import EditMode
from fabric.errors import RejectedError
from fabric.settings import RouterSettings, parse_settings
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hello there"}]
BODIES = {
    "/v1/chat/completions": {"model": MODEL, "messages": USER},
    "/v1/completions": {"model": MODEL, "prompt": "hello there"},
    "/v1/responses": {"model": MODEL, "input": "hello there"},
    "/v1/messages": {"model": MODEL, "max_tokens": 4, "messages": USER},
    "/v1/agents/mira/generate": {"model": MODEL, "messages": USER},
}
HEADER = "X-Macfabric-Edits"
SAYINGS = [
    (None, None),
    ("Amortize", None),
    (None, {"edits": "amortize"}),
    ("exact", {"edits": "amortize"}),
]


@pytest.mark.parametrize("path", BODIES)
async def test_a_header_or_a_field_says_what_becomes_of_edited_memory(path):
    async with rig("a") as made:
        http = made.http()
        for agent, (header, own) in enumerate(SAYINGS):
            body = {**BODIES[path], **({"macfabric": own} if own else {})}
            to = path.replace("mira", f"mira-{agent}")
            answer = await http.post(to, json=body, headers={HEADER: header} if header else {})
            assert answer.status_code == 200, answer.text
        asked = [request.edits for request in made["node-a"].requests]

    assert asked == [None, EditMode.AMORTIZE, EditMode.AMORTIZE, EditMode.FORGET]


async def test_an_operator_chooses_for_those_who_say_nothing():
    async with rig("a", settings=RouterSettings(edits="amortize")) as made:
        await made.chat("hello")
        await made.chat("hello", macfabric={"edits": "exact"})
        asked = [request.edits for request in made["node-a"].requests]

    assert asked == [EditMode.AMORTIZE, EditMode.FORGET]


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_unknown_is_refused_in_each_dialects_words(path):
    wrongs = [
        ({HEADER: "splice"}, {}, "x-macfabric-edits"),
        ({}, {"macfabric": {"edits": "forget"}}, "macfabric.edits"),
        ({}, {"macfabric": {"edits": 1}}, "macfabric.edits"),
        ({}, {"macfabric": "amortize"}, "macfabric"),
    ]
    async with rig("a") as made:
        http = made.http()
        answers = [
            (await http.post(path, json={**BODIES[path], **more}, headers=headers), param)
            for headers, more, param in wrongs
        ]
        assert made["node-a"].requests == []

    for answer, param in answers:
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["type"] == "invalid_request_error"
        assert f"Invalid '{param}'" in error["message"]


def test_a_request_of_an_older_router_says_nothing():
    identity = Identity(IdentityKind.CONTENT)
    made = GenerateRequest("op", "default", identity, Sampling(), prompt="x")
    told = parse_json(dump_json(made))
    assert told.pop("edits") is None

    assert from_plain(GenerateRequest, told).edits is None


def test_settings_know_both_ways():
    assert parse_settings({}).router.edits == "exact"
    assert parse_settings({"router": {"edits": "amortize"}}).router.edits == "amortize"
    with pytest.raises(RejectedError, match=r"router\.edits: is exact\|amortize"):
        parse_settings({"router": {"edits": "forget"}})
