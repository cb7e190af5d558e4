"""A misspelled field of the fabric's own API is refused and named: nothing is done instead."""

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
async def test_a_field_that_is_not_known_is_refused(path, body, tmp_path):
    async with rig(runs_dir=tmp_path) as made:
        await made.chat("hello there", agent="alice")
        got = await made.http().post(path, json={**body, "drop_hott": True})
    error = got.json()["error"]
    assert (got.status_code, error["code"], error["param"]) == (
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
async def test_a_field_within_is_named_by_its_place(body, param):
    async with rig() as made:
        await made.chat("hello there", agent="alice")
        got = await made.http().post(f"{AGENT}/directives", json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)
    assert "did you mean" in got.json()["error"]["message"]
