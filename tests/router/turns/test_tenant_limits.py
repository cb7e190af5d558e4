"""Limits of tenants: turns at once, computed tokens a minute, and how clients are refused."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from fabric.errors import OverloadedError, RejectedError
from fabric.ids import TenantId
from fabric.limits import RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN
from fabric.settings import RouterSettings, parse_settings
from fabric.tenant_settings import TenantLimits
from fabric.turn.generation import Admitted, CacheTier, MatchKind
from router.limits import TENANT_WAIT_S_MAX
from router.telemetry import Telemetry
from router.turns.open_turn import EndedTurn
from router.turns.tenant_limits import RATE_LIMIT, TURNS_LIMIT, TenantAccounts
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, OTHER_KEY, rig, until
from tests.support.clocks import ManualClock

pytestmark = pytest.mark.anyio
ONE, TWO = TenantId("one"), TenantId("two")
KEYS = {"one": KEY, "two": OTHER_KEY}
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/completions": {"model": MODEL, "prompt": "hello"},
    "/v1/responses": {"model": MODEL, "input": "hello"},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 9},
    "/v1/agents/mira/generate": {"text": "hello", "model": MODEL},
}


class World:
    """Accounts over a clock that the test sets."""

    def __init__(self, **limits):
        self.clock = ManualClock()
        self.accounts = TenantAccounts(
            {"one": TenantLimits(**limits)}, self.clock, Telemetry([ONE, TWO])
        )

    def begin(self, tenant=ONE, prompt=0, cached=0):
        """Admit a turn that continues."""
        with self.accounts.count_turn(tenant):
            pass
        first = Admitted(
            "mira", "node-a", 1, CacheTier.COLD, MatchKind.NONE, prompt, cached, "nothing"
        )
        self.accounts.note_admission(tenant, first)

    def end(self, tenant=ONE, tokens=0, seconds=1.0, outcome="ok"):
        ended = EndedTurn(outcome, tokens, seconds, None, tokens)
        self.accounts.note_end(tenant, ended, CacheTier.COLD, 0.0)

    def refusal(self, tenant=ONE):
        with pytest.raises(OverloadedError) as refused:
            self.begin(tenant)
        return refused.value


def test_turns_over_the_limit_are_refused_until_one_ends():
    world = World(turns=2)
    world.begin()
    world.begin()
    refused = world.refusal()
    assert (refused.code, refused.status) == (TURNS_LIMIT, 429)
    assert world.accounts.running_count(ONE) == 2
    world.begin(TWO)  # has no limit
    world.end()
    world.begin()


def test_turn_that_no_node_admits_leaves_its_place():
    world = World(turns=1)
    for _ in range(3):
        with pytest.raises(RejectedError), world.accounts.count_turn(ONE):
            raise RejectedError("no")
    assert world.accounts.running_count(ONE) == 0
    world.begin()


def test_retry_after_follows_the_duration_of_the_tenants_turns():
    world = World(turns=1)
    for _ in range(30):
        world.begin()
        world.end(seconds=20.0)
    world.begin()
    assert 19.0 < world.refusal().retry_after_s <= 20.0


@pytest.mark.parametrize(
    ("seconds", "retry_after_s"), [(0.01, RETRY_AFTER_S_MIN), (10_000.0, RETRY_AFTER_S_MAX)]
)
def test_retry_after_of_short_and_long_turns_is_bounded(seconds, retry_after_s):
    world = World(turns=1)
    for _ in range(30):
        world.begin()
        world.end(seconds=seconds)
    world.begin()
    assert world.refusal().retry_after_s == retry_after_s


def test_retry_after_of_a_small_debt_is_bounded():
    world = World(tokens_per_minute=60_000)
    world.begin(prompt=60_000)
    world.end()
    assert world.refusal().retry_after_s == RETRY_AFTER_S_MIN


def test_computed_tokens_are_limited_and_cached_ones_are_free():
    world = World(tokens_per_minute=600)
    world.begin(prompt=10_000, cached=9_700)
    world.end(tokens=200)
    world.begin()  # 100 are left
    world.end(tokens=400)
    refused = world.refusal()
    assert refused.code == RATE_LIMIT
    assert refused.retry_after_s == pytest.approx(30.1)  # 301 tokens at ten a second
    world.clock.now_s += refused.retry_after_s - 0.2
    world.refusal()
    world.clock.now_s += 0.2
    world.begin()


def test_unused_tokens_of_more_than_a_minute_are_lost():
    world = World(tokens_per_minute=600)
    world.clock.now_s += 3600
    world.begin(prompt=601)
    world.end()
    world.refusal()


def test_retry_after_of_a_large_debt_is_bounded():
    world = World(tokens_per_minute=1)
    world.begin(prompt=1_000_000)
    world.end()
    assert world.refusal().retry_after_s == TENANT_WAIT_S_MAX


def test_answer_that_its_client_leaves_counts():
    world = World(tokens_per_minute=600)
    world.begin()
    world.end(tokens=700, outcome="cancelled")
    assert world.refusal().code == RATE_LIMIT


@asynccontextmanager
async def limited_rig(**limits):
    settings = RouterSettings(
        api_keys=KEYS, tenant_limits={"one": TenantLimits(**limits)}, takeover_after_s=20.0
    )
    async with rig("a", settings=settings) as fabric:
        yield fabric


@pytest.mark.parametrize("path", REQUESTS)
async def test_refusal_has_the_shape_of_its_api(path):
    async with limited_rig(turns=1) as fabric:
        node, http = fabric["node-a"], fabric.http(KEY, operates=False)
        node.behaviour.hang = True
        running = asyncio.create_task(
            http.post("/v1/chat/completions", json=REQUESTS["/v1/chat/completions"])
        )
        await until(lambda: node.requests)
        refused = await http.post(path, json=REQUESTS[path])
        node.behaviour.hang = False
        other = await fabric.http(OTHER_KEY, operates=False).post(path, json=REQUESTS[path])
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await until(lambda: fabric.services.turns.accounts.running_count(ONE) == 0)
        again = await http.post(path, json=REQUESTS[path])

    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    if path == "/v1/messages":
        assert refused.json()["type"] == "error"
        assert error["type"] == "rate_limit_error"
    else:
        assert (error["type"], error["code"]) == ("rate_limit_error", TURNS_LIMIT)
    assert "your limit of turns at once (1) is reached" in error["message"]
    assert (other.status_code, again.status_code) == (200, 200)


async def test_used_up_tokens_refuse_the_next_turn_and_count_it():
    async with limited_rig(tokens_per_minute=4) as fabric:
        http = fabric.http(KEY, operates=False)
        first = await fabric.chat("hello", http=http)
        refused = await fabric.chat("hello", http=http)
        usage = (await http.get("/v1/usage")).json()
        metrics = (await fabric.http().get("/metrics")).text
    assert (first.status_code, refused.status_code) == (200, 429)
    assert refused.json()["error"]["code"] == RATE_LIMIT
    assert int(refused.headers["retry-after"]) > 1
    assert usage["data"][0]["refused_turns"] == 1
    assert usage["limits"] == {"turns": None, "tokens_per_minute": 4, "running_turns": 0}
    assert 'macfabric_refused_turns_total{tenant="one"} 1.0' in metrics
    assert f'macfabric_refusals_total{{code="{RATE_LIMIT}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"tenant_limits": {"one": {"turns": 0}}}, "router.tenant_limits.one.turns"),
        ({"tenant_limits": {"a b": {}}}, "router.tenant_limits.a b"),
        ({"tenant_limits": {"one": {"tokens_per_minute": -1}}}, "one.tokens_per_minute"),
        ({"tenant_limits": {"one": {"tokens": 1}}}, "router.tenant_limits.one.tokens"),
        ({"tenant_limits": {"one": {"turns": "many"}}}, "router.tenant_limits.one.turns"),
    ],
)
def test_invalid_limits_are_named(section, where):
    with pytest.raises(RejectedError) as refused:
        parse_settings({"router": section})
    assert where in str(refused.value.message)
