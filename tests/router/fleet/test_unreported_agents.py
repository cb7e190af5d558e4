"""An agent that an awaited node may own is neither unknown nor started elsewhere."""

import pytest
from starlette.routing import Route

from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from tests.router.admin.test_hibernation import file_of, hibernation_nodes
from tests.router.fake_memory import Memory
from tests.router.fleet.test_node_discovery import join
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
KEY = ("default", "alice")
DIRECTIVE = {"message": 0}
BODIES = {
    "show": None,
    "erase": None,
    "migrate": {"to": "node-a"},
    "pin": {"pinned": True},
    "add": {"directives": [DIRECTIVE]},
    "remove_all": None,
    "remove": None,
    "rebuild": None,
    "decay": {"after_s": 5},
    "last": None,
    "close": None,
    "share": {"scope": "agent"},
    "evict": None,
    "supersede": {"earlier": {"message": 0}, "later": {"message": 1}},
    "hibernate": None,
    "resume": None,
    "fork": {"as": "bob"},
    "replicate": {"to": "node-a"},
    "prefetch": {},
    "cancel": None,
    "generate": {"text": "and?"},
}


def routes_of_agents(app):
    """Return method, path and name of every route that names an agent."""
    found = [route for route in app.routes if isinstance(route, Route) and "{agent}" in route.path]
    return [
        (method, route.path.format(agent="alice", operation="op-0123456789ab"), route.name)
        for route in found
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


def partial_fabric():
    """Return a router that expects two nodes and has found one."""
    settings = RouterSettings(nodes_expected=2)
    nodes = hibernation_nodes("node-a", "node-b")
    return rig(nodes=nodes, settings=settings, started=False, tended=False)


async def test_every_agent_route_answers_503_with_retry_after():
    refused = {}
    async with partial_fabric() as fabric:
        await join(fabric, "node-a")
        http = fabric.http()
        for method, path, name in routes_of_agents(fabric.app):
            content = file_of() if name == "resume" else None
            answer = await http.request(method, path, json=BODIES[name], content=content)
            refused[name] = answer.status_code, answer.headers.get("retry-after"), answer.text
        agents = dict(fabric["node-a"].memory)

    unexpected = {name: text for name, (status, again, text) in refused.items() if status != 503}
    assert unexpected == {}
    assert [name for name, (_, again, _) in refused.items() if not again] == []
    assert all("agents_unknown" in text for _, _, text in refused.values())
    assert agents == {}


async def test_fork_to_name_possibly_on_awaited_node_is_503():
    async with partial_fabric() as fabric:
        await join(fabric, "node-a")
        await fabric.chat("hi", agent="alice")
        answer = await fabric.http().post("/v1/agents/alice/fork", json={"as": "bob"})
        agents = list(fabric["node-a"].memory)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "agents_unknown")
    assert answer.headers["retry-after"]
    assert agents == [KEY]


async def test_resume_with_replace_works_while_nodes_are_awaited():
    async with partial_fabric() as fabric:
        await join(fabric, "node-a")
        path = "/v1/agents/alice/resume?replace=true"
        answer = await fabric.http().post(path, content=file_of())

    assert answer.status_code == 200
    assert answer.json()["epoch"] > 1_024, "node-b may already own alice"


async def test_replica_serves_once_its_owner_is_no_longer_awaited():
    async with partial_fabric() as fabric:
        copy = Memory(*KEY, epoch=3, text="x" * 300, state=OwnerState.REPLICA, owner="node-b")
        fabric["node-a"].memory[KEY] = copy
        await join(fabric, "node-a")
        http, path = fabric.http(), "/v1/agents/alice"
        early = await http.post(f"{path}/pin", json={"pinned": True})
        fabric.fleet.discovery._gathered_s = fabric.fleet.clock.monotonic_s()
        late = await http.post(f"{path}/pin", json={"pinned": True})
        shown = (await http.get(path)).json()

    assert (early.status_code, early.json()["error"]["code"]) == (503, "agents_unknown")
    assert late.status_code == 200, late.text
    assert shown["owner"] == "node-a"
    assert shown["epoch"] > 1_024, "node-b may still own the agent"
