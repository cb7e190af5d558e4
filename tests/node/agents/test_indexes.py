"""A retained agent ranks as just used until its deadline."""

import pytest

from fabric.ids import AgentId
from fabric.limits import RETAIN_S_MAX
from fabric.retention import Candidate, by_benefit
from node.agents.indexes import PROMISED_REUSE, UseLog
from tests.node.fake_engine import FakeClock
from tests.support.blocks import make_manifest


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def use(clock):
    return UseLog(clock)


def record_of(agent="a"):
    return make_manifest([], agent=AgentId(agent))


def rank(use, record):
    idle_s, probability = use.idle_s(record), use.reuse_probability(record)
    return by_benefit(Candidate(record.key, {"block": 100}, idle_s, probability, saves_s=1.0))


def test_retained_agent_ranks_as_just_used_until_its_deadline(use, clock):
    record = record_of()
    use.note(record)
    learned = use.reuse_probability(record)
    use.retain(record.key, 300.0)

    clock.now_s = 299.0
    assert (use.idle_s(record), use.reuse_probability(record)) == (0.0, PROMISED_REUSE)
    clock.now_s = 310.0
    assert (use.idle_s(record), use.reuse_probability(record)) == (10.0, learned)


def test_retained_agent_outranks_agents_used_since(use, clock):
    kept, other = record_of("kept"), record_of("other")
    use.note(kept)
    use.retain(kept.key, 300.0)
    clock.now_s = 60.0
    use.note(other)
    clock.now_s = 61.0

    assert rank(use, kept) > rank(use, other)
    clock.now_s = 400.0
    assert rank(use, kept) == rank(use, other) * (1 + 340.0) / (1 + 100.0)


def test_idle_time_from_before_restart_is_kept(use, clock):
    record = record_of()
    use.recover(record, 3600.0)
    clock.now_s = 5.0

    assert use.idle_s(record) == 3605.0


def test_last_turn_sets_retention_within_limit(use, clock):
    record = record_of()
    use.note(record)
    use.retain(record.key, 3600.0)
    use.retain(record.key, 0.0)
    clock.now_s = 5.0
    assert use.idle_s(record) == 5.0

    use.retain(record.key, 1e12)
    clock.now_s = 5.0 + RETAIN_S_MAX + 7.0
    assert use.idle_s(record) == 7.0
    use.forget(record)
    assert not use._retained_s
