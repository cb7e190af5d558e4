"""A misspelled field of the fabric's own API is refused by name, and has no effect."""

import pytest

from tests.router.rig import rig

pytestmark = pytest.mark.anyio
AGENT = "/v1/agents/alice"
ITEM = {"message": 0, "mode": "exact"}
BODIES = [
    (f"{AGENT}/migrate", {"to": "node-b"}),
    (f"{AGENT}/fork", {"as": "bob"}),
    (f"{AGENT}/generate", {"text": "more", "max_tokens": 2}),
    (f"{AGENT}/replicate", {"to": "node-b"}),
    (f"{AGENT}/prefetch", {}),
    (f"{AGENT}/directives", {"directives": [ITEM]}),
    (f"{AGENT}/decay", {}),
    (f"{AGENT}/share", {"scope": "agent"}),
    (f"{AGENT}/evict", {}),
    (f"{AGENT}/supersede", {"earlier": {"message": 0}, "later": {"message": 1}}),
    ("/v1/nodes/node-a/flush", {}),
    ("/v1/scenarios", {"scenario": "debate"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_unknown_field_is_rejected(path, body, tmp_path):
    async with rig(runs_dir=tmp_path) as fabric:
        await fabric.chat("hello there", agent="alice")
        response = await fabric.http().post(path, json={**body, "drop_hott": True})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400, "unknown_parameter", "drop_hott",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"directives": [{**ITEM, "mod": "exact"}]}, "directives[0].mod"),
        ({"directives": [{"messages": {"first": 0, "last": 1, "lst": 1}}]},
         "directives[0].messages.lst"),
    ],
)  # fmt: skip
async def test_nested_unknown_field_is_named_by_its_path(body, param):
    async with rig() as fabric:
        await fabric.chat("hello there", agent="alice")
        response = await fabric.http().post(f"{AGENT}/directives", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "did you mean" in response.json()["error"]["message"]
