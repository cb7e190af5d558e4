"""An agent that an awaited node may own is neither unknown nor started elsewhere."""

import pytest
from starlette.routing import Route

from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from tests.router.admin.test_hibernation import file_of, keepers
from tests.router.fake_memory import Memory
from tests.router.fleet.test_node_discovery import met
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


def one_of_two():
    """Return a router that expects two nodes and has found one."""
    settings = RouterSettings(nodes_expected=2)
    nodes = keepers("node-a", "node-b")
    return rig(nodes=nodes, settings=settings, started=False, tended=False)


async def test_every_verb_says_when_to_retry():
    refused = {}
    async with one_of_two() as made:
        await met(made, "node-a")
        http = made.http()
        for method, path, name in routes_of_agents(made.app):
            content = file_of() if name == "resume" else None
            answer = await http.request(method, path, json=BODIES[name], content=content)
            refused[name] = answer.status_code, answer.headers.get("retry-after"), answer.text
        begun = dict(made["node-a"].memory)

    told = {name: text for name, (status, again, text) in refused.items() if status != 503}
    assert told == {}
    assert [name for name, (_, again, _) in refused.items() if not again] == []
    assert all("agents_unknown" in text for _, _, text in refused.values())
    assert begun == {}


async def test_a_fork_does_not_take_a_name_that_an_awaited_node_may_have():
    async with one_of_two() as made:
        await met(made, "node-a")
        await made.chat("hi", agent="alice")
        answer = await made.http().post("/v1/agents/alice/fork", json={"as": "bob"})
        begun = list(made["node-a"].memory)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "agents_unknown")
    assert answer.headers["retry-after"]
    assert begun == [KEY]


async def test_a_file_that_replaces_is_taken_while_nodes_are_awaited():
    async with one_of_two() as made:
        await met(made, "node-a")
        path = "/v1/agents/alice/resume?replace=true"
        answer = await made.http().post(path, content=file_of())

    assert answer.status_code == 200
    assert answer.json()["epoch"] > 1_024, "node-b may own an alice"


async def test_a_replica_serves_once_its_owner_is_no_longer_awaited():
    async with one_of_two() as made:
        copy = Memory(*KEY, epoch=3, text="x" * 300, state=OwnerState.REPLICA, owner="node-b")
        made["node-a"].memory[KEY] = copy
        await met(made, "node-a")
        http, path = made.http(), "/v1/agents/alice"
        early = await http.post(f"{path}/pin", json={"pinned": True})
        made.fleet.discovery._gathered_s = made.fleet.clock.monotonic_s()
        late = await http.post(f"{path}/pin", json={"pinned": True})
        shown = (await http.get(path)).json()

    assert (early.status_code, early.json()["error"]["code"]) == (503, "agents_unknown")
    assert late.status_code == 200, late.text
    assert shown["owner"] == "node-a"
    assert shown["epoch"] > 1_024, "node-b may still own her"
