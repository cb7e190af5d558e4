"""Nodes and routers of different versions: they serve together, or report why they cannot."""

import json
from contextlib import nullcontext
from dataclasses import replace

import msgpack
import pytest

from fabric import CONTROL_VERSION, CONTROL_VERSION_MIN
from fabric.codec import from_newer, from_plain, known_part, pack, unpack
from fabric.control import versions
from fabric.control.calls import NamedMessage
from fabric.control.change_calls import ViewChanges
from fabric.control.node_calls import AgentList, NodeView
from fabric.control.versions import check_versions
from fabric.errors import FabricError, RejectedError
from tests.router import fake_node
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
NEWS = {"news": {"of": ["a", "version"]}}


class NewerNode(FakeNode):
    """A node whose answers have fields in every part that this version does not know."""

    async def __call__(self, raw):
        envelope = unpack(NamedMessage, await super().__call__(raw))
        body = msgpack.packb(with_news(msgpack.unpackb(envelope.body, strict_map_key=False)))
        return pack(NamedMessage(envelope.name, body))


def with_news(value):
    if isinstance(value, dict):
        # Counts by name are no fields.
        return {
            k: v if k in {"sending", "fetching", "build"} else with_news(v)
            for k, v in value.items()
        } | NEWS
    return [with_news(item) for item in value] if isinstance(value, list) else value


async def states(fabric):
    rows = (await fabric.http().get("/v1/nodes")).json()["data"]
    return {row["name"]: (row["state"], row.get("failure")) for row in rows}


async def test_newer_node_with_unknown_fields_serves_and_moves_agents(monkeypatch):
    encode = fake_node.encode_event

    def newer(event):
        return json.dumps(json.loads(encode(event)) | NEWS).encode() + b"\n"

    monkeypatch.setattr(fake_node, "encode_event", newer)
    async with rig(nodes=[NewerNode("node-a"), FakeNode("node-b")]) as fabric:
        first = await fabric.chat("hello there", agent="alice")
        target = "node-b" if first.headers["x-macfabric-node"] == "node-a" else "node-a"
        moved = await fabric.http().post("/v1/agents/alice/migrate", json={"to": target})
        again = await fabric.chat("hello there", "hi", "how are you", agent="alice")
        shown = await states(fabric)

    assert (first.status_code, moved.status_code, again.status_code) == (200, 200, 200)
    assert again.headers["x-macfabric-node"] == target
    assert shown == dict.fromkeys(("node-a", "node-b"), ("ready", None))


async def test_node_that_needs_a_newer_router_is_refused_by_name():
    newer = FakeNode("node-a")
    newer.view_changes = {"control": CONTROL_VERSION + 2, "control_min": CONTROL_VERSION + 1}
    async with rig(nodes=[newer, FakeNode("node-b")]) as fabric:
        state, failure = (await states(fabric))["node-a"]
        answer = await fabric.chat("hello", agent="alice")

    assert state == "failed"
    assert failure == (
        f"node-a speaks no version of control calls before {CONTROL_VERSION + 1}, and this router "
        f"speaks {CONTROL_VERSION_MIN} to {CONTROL_VERSION}: upgrade the router"
    )
    assert answer.headers["x-macfabric-node"] == "node-b"


async def test_node_too_old_for_the_router_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(versions, "CONTROL_VERSION_MIN", 2)
    async with rig("a") as fabric:
        await until(lambda: fabric.fleet.membership.find("node-a").failure is not None)
        state, failure = (await states(fabric))["node-a"]
        answer = await fabric.chat("hello", agent="alice")

    assert state == "failed"
    assert failure.startswith("node-a speaks version 1 of control calls")
    assert failure.endswith("upgrade the node")
    assert answer.status_code == 503


async def test_node_with_unreadable_state_is_shown_as_failed():
    async with rig("ab") as fabric:
        fabric["node-a"].view_changes = {"tokens": "many"}
        await until(lambda: fabric.fleet.membership.find("node-a").failure is not None)
        state, failure = (await states(fabric))["node-a"]
        fabric["node-a"].view_changes = {}
        await until(lambda: fabric.fleet.membership.find("node-a").failure is None)

    assert state == "failed"
    assert "tokens: expected int, got str" in failure
    assert "different versions" in failure


async def test_agents_are_not_drained_to_nodes_of_another_protocol():
    nodes = [FakeNode(name) for name in ("node-a", "node-b", "node-c")]
    async with rig(nodes=nodes) as fabric:
        home = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        other, alike = (node for node in nodes if node.name != home)
        other.view_changes = {"protocol": 5}
        for node in (alike, fabric[home]):
            node.view_changes = {"protocol": 4}
        await fabric.fleet.membership.refresh()
        await fabric.http().post(f"/v1/nodes/{home}/drain")
        await until(lambda: fabric.services.drains.find(home).state == "drained")
        owner = (await fabric.http().get("/v1/agents/alice")).json()["owner"]

    assert owner == alike.name


@pytest.mark.parametrize("reported", [{}, {"control": None}, {"control": "1"}])
def test_nodes_without_a_valid_version_count_as_the_first(reported):
    check_versions("node-a", reported)


@pytest.mark.parametrize(("control", "reads"), [(None, False), (1, False), (2, True), (3, True)])
def test_calls_name_their_turn_from_the_second_version_on(control, reads):
    assert replace(FakeNode("node-a").view(), control=control).reads_origins is reads


@pytest.mark.parametrize(
    ("speaks", "least", "serves"), [(1, 1, False), (2, 1, True), (5, 3, True), (5, 4, False)]
)
def test_version_range_of_a_node_must_meet_that_of_the_router(monkeypatch, speaks, least, serves):
    monkeypatch.setattr(versions, "CONTROL_VERSION", 3)
    monkeypatch.setattr(versions, "CONTROL_VERSION_MIN", 2)
    expected = nullcontext() if serves else pytest.raises(FabricError, match="upgrade the")
    with expected:
        check_versions("node-a", {"control": speaks, "control_min": least})


def test_only_unknown_fields_of_newer_answers_are_skipped():
    listed = {"node": "node-a", "incarnation": 1, "changes": 0, "agents": [], **NEWS}
    gone = [{"tenant": "default", "agent": "mira", **NEWS}]
    read = from_newer(AgentList, {**listed, "gone": gone})
    assert [each.agent for each in read.gone] == ["mira"]
    with pytest.raises(RejectedError, match="unknown field 'news'"):
        from_plain(AgentList, listed)
    with pytest.raises(RejectedError, match="is missing"):
        from_newer(AgentList, {**NEWS, "node": "node-a"})
    changes = ViewChanges(1, 2, 1, 0, {"state": "draining", **NEWS})
    view = FakeNode("node-a").view()
    assert changes.apply_to(view) == replace(view, state="draining")
    assert known_part(NodeView, {"bytes": {"hot": 1, "x": 2}, "y": 3}) == {"bytes": {"hot": 1}}
