"""The Python client and its verbs on a real fabric."""

import json

import pytest

from fabric.ids import AgentId, TenantId
from router.cli.main import main
from router.client.client import Fabric
from router.client.http_api import RefusedError
from tests.support.local_fabric import local_fabric

KEYS = {"one": "key-of-tenant-number-one", "two": "key-of-tenant-number-two"}
FILL = "Nobody knows why the library has a second bridge near the old harbour market. " * 24
CODE, SHIP = "otter lantern quartz", "amber falcon comet"
MESSAGES = [
    {"role": "system", "content": "You remember what you are told."},
    {"role": "user", "content": f"{FILL}The vault code of Mira is {CODE}."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": f"{FILL}The ship name of Mira is {SHIP}."},
]
ASK_CODE = {"role": "user", "content": "The vault code of Mira is"}
ASK_SHIP = {"role": "user", "content": "The ship name of Mira is"}
OPTIONS = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", "right", api_keys=KEYS) as instance:
        yield instance


@pytest.fixture(scope="module")
def fabric(running):
    return Fabric(running.url, KEYS["one"])


def start_agent(fabric, name):
    agent = fabric.agent(name)
    assert SHIP in agent.generate(None, *MESSAGES, ASK_SHIP, **OPTIONS)["text"]
    return agent


def test_agent_is_directed_rebuilt_moved_and_forked(fabric):
    agent = start_agent(fabric, "mira")
    assert "mira" in [each["id"] for each in fabric.agents()]
    agent.direct({"text": CODE, "replacement": "[x]", "mode": "amortize"}, operation="tidy-up-1")
    assert SHIP in agent.generate(None, ASK_SHIP, **OPTIONS)["text"]
    assert agent.show()["amortized"]
    other = {"left": "right", "right": "left"}[agent.show()["owner"]]
    assert agent.migrate(other)["to"] == other
    assert agent.show()["amortized"]
    agent.fork("mira-2")
    copy = fabric.agent("mira-2")
    assert copy.memory()["directives"] == agent.memory()["directives"] != []
    assert CODE not in copy.generate(None, ASK_CODE, **OPTIONS)["text"]
    assert agent.rebuild()["rebuilds"]
    assert CODE not in agent.generate(None, ASK_CODE, **OPTIONS)["text"]
    assert not agent.show()["amortized"]
    agent.undo("tidy-up-1")
    assert [each["operation"] for each in agent.memory()["undone"]] == ["tidy-up-1"]
    assert agent.erase()["deleted"]


def test_closed_agent_is_on_disk_and_answers_again(fabric):
    agent = start_agent(fabric, "closed")
    agent.pin()
    row = agent.close()
    assert (row["closed"], row["pinned"], row["tiers"]) == (True, False, ["disk"])
    assert agent.show()["closed"]
    again = agent.generate(None, ASK_CODE, **OPTIONS)
    assert CODE in again["text"]
    assert again["cached_tokens"] > 100
    assert not agent.show()["closed"]


def test_evicted_agent_loads_from_disk_and_only_copy_is_kept(fabric):
    agent = start_agent(fabric, "evicted")
    assert agent.evict()["tiers"] == ["disk"]
    owner = agent.show()["owner"]
    other = {"left": "right", "right": "left"}[owner]
    with pytest.raises(RefusedError) as caught:
        agent.evict(copy_on=owner)
    assert (caught.value.status, caught.value.code) == (409, "only_copy")
    with pytest.raises(RefusedError) as caught:
        agent.evict(copy_on=other)
    assert (caught.value.status, caught.value.param) == (400, "node")
    fabric.call("POST", "/v1/agents/evicted/replicate", {"to": other, "keep": False})
    assert agent.show()["replicas"] == [other]
    agent.evict(copy_on=other)
    assert agent.show()["replicas"] == []
    assert CODE in agent.generate(None, ASK_CODE, **OPTIONS)["text"]


def test_decay_lasts_until_next_turn_and_moves_with_agent(running, fabric):
    agent = start_agent(fabric, "decayed")
    assert agent.decay(600)["decays_after_s"] == 600
    other = {"left": "right", "right": "left"}[agent.show()["owner"]]
    agent.migrate(other)
    running.restart(other)
    assert agent.show()["decays_after_s"] == 600
    agent.fork("decayed-2")
    assert fabric.agent("decayed-2").show()["decays_after_s"] is None
    assert agent.decay(None)["decays_after_s"] is None
    agent.decay()
    table = running.services[other].node.resources.table
    candidate = table._candidate(table.get((TenantId("one"), AgentId("decayed"))), is_fixed=False)
    assert candidate.is_spent
    agent.generate(None, ASK_SHIP, **OPTIONS)
    assert agent.show()["decays_after_s"] is None


def test_hibernation_file_keeps_agent_settings(running, fabric, tmp_path, capsys):
    agent, file = start_agent(fabric, "asleep"), str(tmp_path / "asleep.mfa")
    agent.direct({"message": 1, "text": CODE, "replacement": "[x]", "mode": "amortize"})
    assert SHIP in agent.generate(None, ASK_SHIP, **OPTIONS)["text"]
    agent.decay(300)
    agent.share("agent")
    common = ["--url", running.url, "--key", KEYS["one"]]
    assert main(["hibernate", "asleep", file, *common]) == 0
    assert main(["resume", file, "--as", "awake", *common]) == 0
    capsys.readouterr()
    woken = fabric.agent("awake")
    for field in ("decays_after_s", "share", "closed", "rebuilds", "amortized", "directives"):
        assert woken.show()[field] == agent.show()[field]
    assert woken.show()["share"] == "agent"
    assert CODE not in woken.generate(None, ASK_CODE, **OPTIONS)["text"]


def test_private_memory_is_visible_to_its_agent_only(running, fabric):
    """Neither a fork nor a conversation with the same prefix reuses its blocks."""
    lone = Fabric(running.url, KEYS["two"])
    agent = start_agent(lone, "private")
    assert agent.share("agent")["share"] == "agent"
    with pytest.raises(RefusedError) as caught:
        agent.fork("private-2")
    assert caught.value.code == "not_shared"
    node = running.services[agent.show()["owner"]].node
    private_agent = node.resources.table.get((TenantId("two"), AgentId("private")))
    stranger = node.resources.table.unlisted(TenantId("two"), AgentId("stranger"), None, 1)
    ids = private_agent.manifest.token_ids

    def lent(agent):
        shared = node.resources.store.shared_prefix(TenantId("two"), ids).blocks
        return node.resources.table.count_usable(agent, shared, ())

    assert not node.resources.table.has_private(private_agent)
    assert node.resources.table.has_private(stranger)
    assert lent(private_agent) > 1
    assert lent(stranger) == 0
    agent.share("tenant")
    assert lent(stranger) > 1
    agent.fork("private-2")
    assert lone.agent("private-2").show()["share"] == "tenant"


def test_agent_is_inaccessible_to_other_tenants(running, fabric):
    agent = start_agent(fabric, "shared")
    agent.share("tenant")
    stranger = Fabric(running.url, KEYS["two"]).agent("shared")
    for act in (stranger.memory, stranger.close, stranger.decay, stranger.evict, stranger.rebuild):
        with pytest.raises(RefusedError) as caught:
            act()
        assert caught.value.status == 404
    with pytest.raises(RefusedError):
        stranger.fork("stolen")
    assert not agent.show()["closed"]


def test_supersede_replaces_earlier_result(fabric):
    agent = start_agent(fabric, "twice")
    receipt = agent.supersede(1, 3, operation="newer-one")
    assert [each["message"] for each in receipt["directives"]] == [1]
    assert CODE not in agent.generate(None, ASK_CODE, **OPTIONS)["text"]
    for earlier, later in ((2, 1), (1, 1)):
        with pytest.raises(RefusedError) as caught:
            agent.supersede(earlier, later)
        assert caught.value.param == "later.message"
    called = agent.supersede("call_1", "call_2")
    assert called["directives"][-1]["result_of"] == "call_1"


def test_commands_report_agent_settings(fabric, running, capsys):
    start_agent(fabric, "said")
    common = ["--url", running.url, "--key", KEYS["one"], "--json"]

    def run(*words):
        assert main([*words, *common]) == 0
        return json.loads(capsys.readouterr().out)

    assert run("decay", "said", "--after", "9")["decays_after_s"] == 9
    assert run("decay", "said", "--off")["decays_after_s"] is None
    assert run("share", "said", "--scope", "agent")["share"] == "agent"
    assert run("evict", "said")["tiers"] == ["disk"]
    assert run("supersede", "said", "message:1", "call_2")["directives"]
    assert run("close", "said")["closed"]
