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


async def test_both_sdks_list_served_models():
    async with rig(nodes=[FakeNode("node-a"), FakeNode("node-b", model="org/b")]) as fabric:
        theirs, ours = fabric.openai(), fabric.anthropic()
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


async def test_model_page_has_first_and_last_ids_even_if_empty():
    async with rig("a") as fabric:
        full = (await fabric.http().get("/v1/models", headers=VERSION)).json()
        fabric.fleet.membership.models = list
        empty = (await fabric.http().get("/v1/models", headers=VERSION)).json()

    assert (full["first_id"], full["last_id"], full["has_more"]) == (MODEL, MODEL, False)
    assert empty == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("name", ["gpt-4o", "claude-opus-9"])
async def test_alias_is_served_under_its_own_name(name):
    async with rig("a", settings=ALIASED) as fabric:
        chat = await fabric.openai().chat.completions.create(model=name, messages=USER)
        message = await fabric.anthropic().messages.create(model=name, messages=USER, max_tokens=9)
        listed = (await fabric.http().get("/v1/models")).json()["data"]
        shown = await fabric.http().get(f"/v1/models/{name}")

    assert (chat.model, message.model) == (name, name)
    assert [model["id"] for model in listed] == [MODEL, "gpt-4o"]
    assert shown.json()["id"] == name


async def test_longest_alias_prefix_wins_but_served_name_has_priority():
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="claude-b")]
    async with rig(nodes=nodes, settings=ALIASED) as fabric:
        http = fabric.http()
        wrong = await http.post(
            "/v1/chat/completions", json={"model": "claude-x1", "messages": USER}
        )
        own = await http.post("/v1/chat/completions", json={"model": "claude-b", "messages": USER})

    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert own.headers["x-macfabric-node"] == "node-b"


async def test_max_tokens_is_capped_by_settings():
    async with rig("a", settings=RouterSettings(completion_tokens_max=5_000)) as fabric:
        for limits in ({}, {"max_tokens": 4_000}, {"max_tokens": 90_000}):
            await fabric.chat("hi", **limits)
        limits_sent = [request.sampling.max_tokens for request in fabric["node-a"].requests]
    async with rig("a") as fabric:
        await fabric.chat("hi")
        free = fabric["node-a"].requests[0].sampling.max_tokens

    assert limits_sent == [5_000, 4_000, 5_000]
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
def test_invalid_model_settings_are_named(router):
    with pytest.raises(RejectedError, match=next(iter(router))):
        parse_settings({"router": router})


LIMITED = RouterSettings(
    model_aliases={"gpt-4o": MODEL, "old": "gone"}, completion_tokens_max=5_000
)


async def test_models_list_smallest_context_and_completion_cap():
    nodes = [FakeNode("node-a"), FakeNode("node-b"), FakeNode("node-c", model="org/b")]
    nodes[1].view_changes = {"context_tokens_max": 32_768}
    nodes[2].view_changes = {"context_tokens_max": 4_096}
    async with rig(nodes=nodes, settings=LIMITED) as fabric:
        http = fabric.http()
        rows = {row["id"]: row for row in (await http.get("/v1/models")).json()["data"]}
        shown = [(await http.get(f"/v1/models/{name}")).json() for name in rows if name != "old"]
        theirs = {model.id: model async for model in fabric.anthropic().models.list()}
        one = await fabric.anthropic().models.retrieve("gpt-4o")

    for name, context, answer in ((MODEL, 32_768, 5_000), ("gpt-4o", 32_768, 5_000),
                                  ("org/b", 4_096, 4_096)):  # fmt: skip
        for field in ("max_model_len", "context_length", "context_window",
                      "max_context_length", "loaded_context_length"):  # fmt: skip
            assert rows[name][field] == context, (name, field)
        for field in ("max_output_tokens", "max_completion_tokens"):
            assert rows[name][field] == answer, (name, field)
        assert (theirs[name].max_input_tokens, theirs[name].max_tokens) == (context, answer)
        assert theirs[name].lifecycle == "active"
    assert shown == [row for name, row in rows.items() if name != "old"]
    assert (one.max_input_tokens, one.max_tokens) == (32_768, 5_000)
    assert "max_model_len" not in rows["old"], "no node serves it"
    assert theirs["old"].max_input_tokens is None


async def test_codex_catalog_has_context_window():
    async with rig("a", settings=LIMITED) as fabric:
        http = fabric.http()
        plain = (await http.get("/v1/models")).json()
        catalog = (await http.get("/v1/models?client_version=0.169.0")).json()

    assert "models" not in plain
    assert catalog["data"] == plain["data"]
    entries = {entry["slug"]: entry for entry in catalog["models"]}
    assert (entries[MODEL]["context_window"], entries[MODEL]["visibility"]) == (100_000, "list")
    assert "context_window" not in entries["old"]
    # Codex refuses a catalog without one of these fields.
    required = {
        "slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility",
        "supported_in_api", "priority", "base_instructions", "supports_reasoning_summaries",
        "support_verbosity", "truncation_policy", "supports_parallel_tool_calls",
        "experimental_supported_tools",
    }  # fmt: skip
    assert all(
        required <= entry.keys() and entry["base_instructions"] for entry in entries.values()
    )


async def test_health_has_two_paths_and_embeddings_are_404():
    async with rig("a") as fabric:
        http = fabric.http()
        health = [(await http.get(path)).status_code for path in ("/health", "/healthz")]
        with pytest.raises(openai.NotFoundError, match="no embeddings"):
            await fabric.openai().embeddings.create(model=MODEL, input="x")

    assert health == [200, 200]
