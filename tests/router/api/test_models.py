"""Models by name: listed in two shapes, and requested by aliases."""

import anthropic
import openai
import pytest

from fabric.errors import RejectedError
from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.settings import RouterSettings, parse_settings
from tests.router.fake_node import MODEL, FakeNode
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hi"}]
ALIASED = RouterSettings(model_aliases={"gpt-4o": MODEL, "claude-*": MODEL, "claude-x*": "none"})
VERSION = {"anthropic-version": "2023-06-01"}


async def test_both_sdks_list_what_there_is():
    async with rig(nodes=[FakeNode("node-a"), FakeNode("node-b", model="org/b")]) as made:
        theirs, ours = made.openai(), made.anthropic()
        listed = [model async for model in theirs.models.list()]
        paged = [model async for model in ours.models.list()]
        one, same = await theirs.models.retrieve("org/b"), await ours.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await theirs.models.retrieve("gpt")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await ours.models.retrieve("gpt")

    assert [(model.id, model.object) for model in listed] == [(MODEL, "model"), ("org/b", "model")]
    assert [(model.id, model.type) for model in paged] == [(MODEL, "model"), ("org/b", "model")]
    assert (one.id, same.id, same.display_name) == ("org/b", MODEL, MODEL)
    assert same.created_at.year > 2020
    assert missing.value.body["error"]["type"] == "not_found_error"


async def test_a_page_tells_its_ends_also_where_it_is_empty():
    async with rig("a") as made:
        full = (await made.http().get("/v1/models", headers=VERSION)).json()
        made.fleet.models = list
        empty = (await made.http().get("/v1/models", headers=VERSION)).json()

    assert (full["first_id"], full["last_id"], full["has_more"]) == (MODEL, MODEL, False)
    assert empty == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("name", ["gpt-4o", "claude-opus-9"])
async def test_an_alias_is_served_under_its_own_name(name):
    async with rig("a", settings=ALIASED) as made:
        chat = await made.openai().chat.completions.create(model=name, messages=USER)
        said = await made.anthropic().messages.create(model=name, messages=USER, max_tokens=9)
        listed = (await made.http().get("/v1/models")).json()["data"]
        shown = await made.http().get(f"/v1/models/{name}")

    assert (chat.model, said.model) == (name, name)
    assert [model["id"] for model in listed] == [MODEL, "gpt-4o"]
    assert shown.json()["id"] == name


async def test_the_longer_beginning_decides_and_a_served_name_goes_before_it():
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="claude-b")]
    async with rig(nodes=nodes, settings=ALIASED) as made:
        http = made.http()
        wrong = await http.post(
            "/v1/chat/completions", json={"model": "claude-x1", "messages": USER}
        )
        own = await http.post("/v1/chat/completions", json={"model": "claude-b", "messages": USER})

    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert own.headers["x-macfabric-node"] == "node-b"


async def test_an_answer_is_as_long_as_asked_for_within_the_cap():
    async with rig("a", settings=RouterSettings(completion_tokens_max=5_000)) as made:
        for limits in ({}, {"max_tokens": 4_000}, {"max_tokens": 90_000}):
            await made.chat("hi", **limits)
        asked = [request.sampling.max_tokens for request in made["node-a"].requests]
    async with rig("a") as made:
        await made.chat("hi")
        free = made["node-a"].requests[0].sampling.max_tokens

    assert asked == [5_000, 4_000, 5_000]
    assert free == COMPLETION_TOKENS_MAX


@pytest.mark.parametrize(
    "router",
    [
        {"model_aliases": {"": "recall"}},
        {"model_aliases": {"gpt": ""}},
        {"model_aliases": {f"m{i}": "recall" for i in range(257)}},
        {"model_aliases": ["gpt"]},
        {"completion_tokens_max": 0},
        {"completion_tokens_max": COMPLETION_TOKENS_MAX + 1},
    ],
    ids=lambda router: str(router)[:40],
)
def test_wrong_settings_are_named(router):
    with pytest.raises(RejectedError, match=next(iter(router))):
        parse_settings({"router": router})


async def test_health_goes_by_both_names_and_embeddings_are_none():
    async with rig("a") as made:
        http = made.http()
        health = [(await http.get(path)).status_code for path in ("/health", "/healthz")]
        with pytest.raises(openai.NotFoundError, match="no embeddings"):
            await made.openai().embeddings.create(model=MODEL, input="x")

    assert health == [200, 200]
