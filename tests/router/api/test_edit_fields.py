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
HEADERS_AND_FIELDS = [
    (None, None),
    ("Amortize", None),
    (None, {"edits": "amortize"}),
    ("exact", {"edits": "amortize"}),
]


@pytest.mark.parametrize("path", BODIES)
async def test_edit_mode_is_read_from_header_or_field(path):
    async with rig("a") as fabric:
        http = fabric.http()
        for agent, (header, own) in enumerate(HEADERS_AND_FIELDS):
            body = {**BODIES[path], **({"macfabric": own} if own else {})}
            to = path.replace("mira", f"mira-{agent}")
            answer = await http.post(to, json=body, headers={HEADER: header} if header else {})
            assert answer.status_code == 200, answer.text
        edit_modes = [request.edits for request in fabric["node-a"].requests]

    assert edit_modes == [None, EditMode.AMORTIZE, EditMode.AMORTIZE, EditMode.FORGET]


async def test_operator_setting_is_the_default_edit_mode():
    async with rig("a", settings=RouterSettings(edits="amortize")) as fabric:
        await fabric.chat("hello")
        await fabric.chat("hello", macfabric={"edits": "exact"})
        edit_modes = [request.edits for request in fabric["node-a"].requests]

    assert edit_modes == [EditMode.AMORTIZE, EditMode.FORGET]


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_edit_mode_is_rejected_in_each_dialect(path):
    cases = [
        ({HEADER: "splice"}, {}, "x-macfabric-edits"),
        ({}, {"macfabric": {"edits": "forget"}}, "macfabric.edits"),
        ({}, {"macfabric": {"edits": 1}}, "macfabric.edits"),
        ({}, {"macfabric": "amortize"}, "macfabric"),
    ]
    async with rig("a") as fabric:
        http = fabric.http()
        answers = [
            (await http.post(path, json={**BODIES[path], **more}, headers=headers), param)
            for headers, more, param in cases
        ]
        assert fabric["node-a"].requests == []

    for answer, param in answers:
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["type"] == "invalid_request_error"
        assert f"Invalid '{param}'" in error["message"]


def test_request_of_older_router_has_no_edit_mode():
    identity = Identity(IdentityKind.CONTENT)
    request = GenerateRequest("op", "default", identity, Sampling(), prompt="x")
    plain = parse_json(dump_json(request))
    assert plain.pop("edits") is None

    assert from_plain(GenerateRequest, plain).edits is None


def test_settings_accept_both_edit_modes():
    assert parse_settings({}).router.edits == "exact"
    assert parse_settings({"router": {"edits": "amortize"}}).router.edits == "amortize"
    with pytest.raises(RejectedError, match=r"router\.edits: is exact\|amortize"):
        parse_settings({"router": {"edits": "forget"}})
