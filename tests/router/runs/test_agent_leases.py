"""Leases of agents: one run at a time, until it lets them go or is gone."""

import pytest

from fabric.errors import OverloadedError
from fabric.ids import TenantId
from router.limits import SCENARIO_LEASE_S
from router.runs import agent_leases as module
from router.runs.agent_leases import AgentLeases, HeldLease, WantedLease
from router.runs.lease_file import NAME, read_leases, write_leases
from tests.router.rig import KEY, OTHER_KEY, rig
from tests.router.runs.test_runs_api import TENANTS, YAML, begin, code_of

ONE, TWO = TenantId("one"), TenantId("two")
KEYS = ("key-of-the-first-run", "key-of-another-run")


class Hands:
    """A clock set by hand."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic_s(self):
        return self.now_s


def lease(key=KEYS[0], run="first", agents=("a", "b")):
    return WantedLease(run, key, frozenset(agents))


def test_a_lease_is_renewed_lapses_and_is_its_tenants():
    clock = Hands()
    leases = AgentLeases(clock)
    leases.take(ONE, lease())
    assert leases.find_user(ONE, {"b", "c"}) == "first"
    assert leases.find_user(ONE, {"b"}, KEYS[0]) is None, "the same run"
    assert leases.find_user(ONE, {"c"}) is None
    assert leases.find_user(TWO, {"b"}) is None
    clock.now_s = SCENARIO_LEASE_S - 1
    leases.take(ONE, lease(agents=("c",)))
    clock.now_s += SCENARIO_LEASE_S - 1
    assert leases.find_user(ONE, {"b"}) is None, "agents replace those leased before"
    assert leases.find_user(ONE, {"c"}) == "first"
    clock.now_s += 1
    assert leases.find_user(ONE, {"c"}) is None
    assert leases.release(ONE, KEYS[0]) is False


def test_leases_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "SCENARIO_LEASES_MAX", 4)
    clock = Hands()
    leases = AgentLeases(clock)
    for number in range(2):
        leases.take(ONE, lease(f"key-{number}"))
    with pytest.raises(OverloadedError):
        leases.take(ONE, lease("key-2"))
    leases.take(TWO, lease("key-0"))
    clock.now_s = SCENARIO_LEASE_S
    leases.take(ONE, lease("key-2"))


@pytest.mark.anyio
async def test_runs_in_the_router_and_elsewhere_keep_each_other_away(tmp_path):
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as made:
        one, two = made.http(KEY), made.http(OTHER_KEY)
        path = "/v1/scenarios/mine/lease"
        body = {"key": KEYS[0], "agents": ["scn.two-rooms.marco"]}
        for _ in range(2):
            assert (await one.post(path, json=body)).json()["object"] == "scenario.lease"
        assert (await two.post(path, json=body | {"key": KEYS[1]})).status_code == 200
        refused = await one.post(path, json=body | {"key": KEYS[1]})
        assert code_of(refused) == (409, "agents_in_use")
        got = await one.post("/v1/scenarios", json={"yaml": YAML, "run": "first"})
        assert code_of(got) == (409, "agents_in_use")
        assert "run 'mine' uses" in got.json()["error"]["message"]
        ended = [await one.delete(f"{path}?key={KEYS[0]}") for _ in range(2)]
        assert [each.json()["deleted"] for each in ended] == [True, False]
        made["node-a"].does.first_delay_s = 3600.0
        await begin(one, yaml=YAML, run="first")
        refused = await one.post(path, json=body)
        assert code_of(refused) == (409, "agents_in_use")
        assert "run 'first' uses" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_bodies_that_are_no_lease_are_refused(tmp_path):
    good = {"key": KEYS[0], "agents": ["a"]}
    bad = (
        {}, {"key": KEYS[0]}, good | {"key": "short"}, good | {"agents": []},
        good | {"agents": ["a b"]}, good | {"agents": [1]}, good | {"agents": ["a"] * 129},
        good | {"agent": "b"},
    )  # fmt: skip
    async with rig("a", runs_dir=tmp_path) as made:
        for body in bad:
            got = await made.http().post("/v1/scenarios/mine/lease", json=body)
            assert got.status_code == 400, body
        assert (await made.http().post("/v1/scenarios/No/lease", json=good)).status_code == 400


@pytest.mark.anyio
async def test_leases_outlive_the_router(tmp_path):
    wanted = {"key": KEYS[0], "agents": ["scn.two-rooms.marco"]}
    other = {"key": KEYS[1], "agents": ["scn.two-rooms.marco"]}
    path = "/v1/scenarios/mine/lease"
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as made:
        assert (await made.http(KEY).post(path, json=wanted)).status_code == 200
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as made:
        one, two = made.http(KEY), made.http(OTHER_KEY)
        refused = [
            await one.post("/v1/scenarios/theirs/lease", json=other),
            await one.post("/v1/scenarios", json={"yaml": YAML, "run": "first"}),
        ]
        assert [code_of(each) for each in refused] == [(409, "agents_in_use")] * 2
        assert (await two.post(path, json=other)).status_code == 200, "another tenant's"
        assert (await one.post(path, json=wanted)).status_code == 200, "its own"
        assert (await one.delete(f"{path}?key={KEYS[0]}")).status_code == 200
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as made:
        assert (await made.http(KEY).post(path, json=other)).status_code == 200


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", '{"format": 2, "leases": []}', '{"format": 1, "leases": [{}]}']
)
def test_a_damaged_lease_file_holds_nothing(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    assert read_leases(tmp_path) == []
    write_leases(tmp_path, [HeldLease("one", "first", KEYS[0], ("a",))])
    assert [lease.run for lease in read_leases(tmp_path)] == ["first"]
