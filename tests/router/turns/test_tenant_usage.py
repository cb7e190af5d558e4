"""Usage of tenants: counted by hour and day, stored, read again, and bounded."""

import asyncio
import json

import pytest

from fabric.errors import RejectedError
from fabric.ids import TenantId
from fabric.settings import RouterSettings
from fabric.turn.generation import Admitted, CacheTier, MatchKind, TurnTimes
from router.limits import USAGE_BYTES_MAX, USAGE_HOURS, USAGE_PAGE_MAX, USAGE_ROWS_MAX
from router.turns import tenant_usage
from router.turns.tenant_usage import (
    Period,
    TenantUsage,
    UsageFile,
    UsageKeeper,
    decode_usage,
    encode_usage,
    saved_s,
)
from tests.router.rig import KEY, OTHER_KEY, rig, until
from tests.support.clocks import ManualClock

ONE, TWO = TenantId("one"), TenantId("two")
HOUR_S = 3600
SETTINGS = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY}, takeover_after_s=20.0)


def admission(prompt, cached, fetched=None):
    return Admitted(
        "mira", "node-a", 1, CacheTier.HOT, MatchKind.EXTEND, prompt, cached, "",
        fetched_tokens=fetched,
    )  # fmt: skip


def turn(usage, tenant=ONE, prompt=100, cached=60, answer=7, *, is_ok=True):
    usage.note_admission(tenant, admission(prompt, cached, 5))
    usage.note_end(tenant, answer, TurnTimes(prefill_s=0.5, decode_s=1.0), is_ok=is_ok)


def test_usage_counts_computed_and_cached_tokens():
    usage = TenantUsage(ManualClock())
    turn(usage)
    turn(usage, is_ok=False)
    usage.note_refusal(ONE)
    (hour,), (day,) = usage.rows(ONE, Period.HOUR), usage.rows(ONE, Period.DAY)
    assert hour.counts == day.counts
    counts = hour.counts
    assert (counts.turns, counts.broken_turns, counts.refused_turns) == (1, 1, 1)
    assert (counts.prompt_tokens, counts.cached_tokens, counts.computed_tokens) == (200, 120, 80)
    assert (counts.fetched_tokens, counts.completion_tokens, counts.compute_s) == (10, 14, 3.0)
    assert (hour.start_s % HOUR_S, day.start_s % (24 * HOUR_S)) == (0, 0)


def test_saved_seconds_are_those_to_recompute_less_those_to_fetch_and_load():
    usage = TenantUsage(ManualClock())
    for recompute_s in (10.0, 0.5):  # the second turn's load took longer than it saved
        usage.note_end(ONE, 1, TurnTimes(fetch_s=0.5, load_s=0.25), is_ok=True, saved_s=saved_s(
            recompute_s, TurnTimes(fetch_s=0.5, load_s=0.25)))  # fmt: skip
    (day,) = usage.rows(ONE, Period.DAY)
    assert day.counts.saved_s == 9.25
    assert saved_s(10.0, None) == 0.0  # a turn that ended before its times were known


def test_old_hours_are_dropped_and_days_are_kept():
    clock = ManualClock()
    usage = TenantUsage(clock)
    for _ in range(USAGE_HOURS + 10):
        turn(usage)
        clock.now_s += HOUR_S
    hours = usage.rows(ONE, Period.HOUR)
    assert len(hours) == USAGE_HOURS
    assert [row.start_s for row in hours] == sorted((r.start_s for r in hours), reverse=True)
    assert sum(row.counts.turns for row in usage.rows(ONE, Period.DAY)) == USAGE_HOURS + 10


def test_rows_of_too_many_tenants_are_bounded(monkeypatch):
    monkeypatch.setattr(tenant_usage, "USAGE_ROWS_MAX", 10)
    usage = TenantUsage(ManualClock())
    for number in range(50):
        usage.note_refusal(TenantId(f"tenant-{number}"))
        assert len(usage.rows()) <= 10
    assert len(usage.rows()) == 10


def test_oldest_rows_of_too_many_are_dropped_first(monkeypatch):
    monkeypatch.setattr(tenant_usage, "USAGE_ROWS_MAX", 4)
    clock = ManualClock()
    usage = TenantUsage(clock)
    hours = []
    for _ in range(6):
        usage.note_refusal(ONE)
        hours.append(usage.rows(ONE, Period.HOUR)[0].start_s)
        clock.now_s += HOUR_S
    assert [row.start_s for row in usage.rows(ONE, Period.HOUR)] == hours[:-4:-1]


def test_prompt_with_more_cached_tokens_than_it_has_computes_none():
    usage = TenantUsage(ManualClock())
    turn(usage, prompt=100, cached=101)
    assert usage.rows(ONE, Period.DAY)[0].counts.computed_tokens == 0


def test_file_of_all_rows_stays_within_its_limits():
    usage = TenantUsage(ManualClock())
    for number in range(USAGE_ROWS_MAX // 2):
        turn(usage, TenantId(f"tenant-{number:054}"), prompt=10**12, cached=10**11, answer=10**9)
    rows = usage.rows()
    raw = encode_usage(rows).encode()
    assert len(rows) == USAGE_ROWS_MAX
    assert len(raw) <= USAGE_BYTES_MAX
    assert len(decode_usage(raw)) == USAGE_ROWS_MAX


def test_counters_survive_a_restart(tmp_path):
    clock, file = ManualClock(), UsageFile(tmp_path / "usage.json")
    first = TenantUsage(clock)
    turn(first)
    asyncio.run(UsageKeeper(first, file).store())  # nothing has changed since it was built
    assert not (tmp_path / "usage.json").exists()
    keeper = UsageKeeper(first, file)
    turn(first)
    asyncio.run(keeper.store())
    assert (tmp_path / "usage.json").stat().st_mode & 0o777 == 0o600

    second = TenantUsage(clock)
    turn(second, TWO)  # before the file was read
    turn(second)
    UsageKeeper(second, file)
    turn(second)
    (mine,) = second.rows(ONE, Period.HOUR)
    assert mine.counts.turns == 4
    assert len(second.rows()) == 4


@pytest.mark.anyio
async def test_changed_usage_is_stored_while_the_router_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tenant_usage, "USAGE_SAVE_S", 0.01)
    path = tmp_path / "usage.json"
    usage = TenantUsage(ManualClock())
    storing = asyncio.create_task(UsageKeeper(usage, UsageFile(path)).run())
    turn(usage)
    await until(path.exists)
    await asyncio.sleep(0.1)  # for a write in progress
    path.unlink()
    await asyncio.sleep(0.1)
    assert not path.exists(), "nothing has changed since"
    turn(usage)
    await until(path.exists)
    storing.cancel()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b'{"format":2,"counters":[],"rows":[]}',
        b'{"format":1,"counters":["turns"],"rows":[["one","day",0]]}',
        b'{"format":1,"counters":["turns"],"rows":[["one","year",0,1]]}',
        b'{"format":1,"counters":["turns"],"rows":[["one","day",0,-1]]}',
        b'{"format":1,"counters":["turns"],"rows":[["o e","day",0,1]]}',
        b'{"format":1,"counters":["turns"],"rows":[["one","day",0,"1"]]}',
        b'{"format":1,"counters":["guesses"],"rows":[["one","day",0,1]]}',
        b'{"format":1,"counters":["turns"],"rows":"many"}',
        b"x" * (USAGE_BYTES_MAX + 1),
    ],
)
def test_damaged_file_is_ignored_with_a_warning(tmp_path, raw, caplog):
    path = tmp_path / "usage.json"
    path.write_bytes(raw)
    with pytest.raises(RejectedError):
        decode_usage(raw)
    assert UsageFile(path).read() == ()
    assert "is ignored" in caplog.text


def test_older_file_with_fewer_counters_is_read():
    raw = json.dumps({"format": 1, "counters": ["turns"], "rows": [["one", "day", 0, 3]]})
    (row,) = decode_usage(raw.encode())
    assert (row.counts.turns, row.counts.prompt_tokens) == (3, 0)


# --- the route -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_tenants_see_their_own_usage_and_operators_all():
    async with rig("a", settings=SETTINGS) as fabric:
        mine = fabric.http(KEY, operates=False)
        fabric["node-a"].view_changes = {"prefill_tokens_per_s": 2.0}
        await fabric.fleet.membership.refresh()
        await fabric.chat("hello", agent="mira", http=mine)
        await fabric.chat("hello", "x", "y", agent="mira", http=mine)
        await fabric.chat("hello", http=fabric.http(OTHER_KEY, operates=False))
        own = (await mine.get("/v1/usage")).json()
        hours = (await mine.get("/v1/usage?period=hour")).json()
        every = (await fabric.http().get("/v1/usage")).json()
        named = (await fabric.http().get("/v1/usage?tenant=two")).json()
        foreign = await mine.get("/v1/usage?tenant=two")
        wrong = await mine.get("/v1/usage?period=year")
        page = (await fabric.http().get("/v1/usage?limit=1")).json()
        whole = (await fabric.http().get("/v1/usage?limit=2")).json()
        large = await fabric.http().get(f"/v1/usage?limit={USAGE_PAGE_MAX + 1}")
    (row,) = own["data"]
    assert (row["object"], row["tenant"], row["period"], row["turns"]) == ("usage", "one", "day", 2)
    assert row["computed_tokens"] == row["prompt_tokens"] - row["cached_tokens"]
    assert row["cached_tokens"] > 0
    assert row["saved_s"] == row["cached_tokens"] / 2.0 - 0.5  # a fake node loads for 0.5 s
    assert row["completion_tokens"] > 0
    assert hours["data"][0]["period"] == "hour"
    assert {each["tenant"] for each in every["data"]} == {"one", "two"}
    assert every["limits"] is None
    assert [each["tenant"] for each in named["data"]] == ["two"]
    assert foreign.status_code == 403
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "period")
    assert (len(page["data"]), page["has_more"]) == (1, True)
    assert (len(whole["data"]), whole["has_more"]) == (2, False)
    assert (large.status_code, large.json()["error"]["param"]) == (400, "limit")
