"""Under memory pressure idle agents leave RAM without loss, and return afterwards."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fabric.control.node_calls import Describe, NodeView
from node.limits import MEMORY_CALM_S, MEMORY_FLOOR_PARTS, MEMORY_SHRINK_PARTS, MEMORY_SHRINK_S
from node.machine import Pressure
from node.tiers.memory_pressure import MemoryGauge, MemoryPressure
from tests.node.fake_engine import FakeClock
from tests.support.services import ask, call, running
from tests.support.tiny_models import ONE_LAYER, write_model

TOTAL_BYTES, ALONE_BYTES = 512 << 10, 256 << 10  # an agent has 60 KiB
PROMPT = [{"role": "user", "content": "remember this: " + "a long story " * 60}]


class Bench:
    """A running node on a machine whose memory pressure the test sets."""

    def __init__(self, service):
        self.service, self.node = service, service.node
        self.level, self.excess_bytes, self.clock = Pressure.NORMAL, 0, FakeClock()
        self.returned_count = 0
        node = self.node
        engine = SimpleNamespace(
            budget=node.resources.engine.budget, return_unused=self._return_unused
        )
        gauge = MemoryGauge(lambda: self.level, lambda: self.excess_bytes)
        self.pressure = MemoryPressure(gauge, engine, node.tiers.hot, self.clock, pytest.fail)

    async def _return_unused(self):
        self.returned_count += 1
        await self.node.resources.engine.return_unused()

    def step(self):
        self.service._on_loop(self.pressure.step()).result(60)
        return self.node.resources.engine.budget.limit_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny", ONE_LAYER))


@contextmanager
def bench_of(folder, model, **settings):
    with running(folder, model, **settings) as service:
        yield Bench(service)


def hot_agents(bench):
    return [agent for agent in bench.node.resources.table if agent.cache is not None]


def test_idle_agents_move_to_disk_under_pressure_without_loss(tmp_path, model):
    with bench_of(tmp_path, model, hot_bytes=TOTAL_BYTES) as bench:
        for name in "abcdef":
            ask(bench.service, PROMPT, agent=name, max_tokens=4)
        before_bytes, total_bytes = bench.node.resources.table.hot_bytes, TOTAL_BYTES
        assert before_bytes > total_bytes // 2, "agents fill the budget"

        bench.level = Pressure.WARNING
        first_bytes = bench.step()
        assert first_bytes == before_bytes - total_bytes // MEMORY_SHRINK_PARTS
        assert bench.node.resources.table.hot_bytes <= first_bytes
        assert bench.returned_count == 1

        bench.clock.now_s += MEMORY_SHRINK_S - 1
        assert bench.step() == first_bytes, "the system has not yet noticed the returned memory"
        bench.clock.now_s += 1
        assert bench.step() < first_bytes

        bench.level = Pressure.CRITICAL
        for _ in range(MEMORY_SHRINK_PARTS):
            bench.step()
        assert bench.step() == total_bytes // MEMORY_FLOOR_PARTS
        view = call(bench.service, Describe(), NodeView)
        assert view.hot_limit_bytes == total_bytes // MEMORY_FLOOR_PARTS
        assert view.hot_total_bytes == total_bytes
        assert view.free.hot == max(0, view.hot_limit_bytes - view.bytes.hot)
        assert view.dropped_caches == 6 - len(hot_agents(bench)) > 0

        again = ask(bench.service, PROMPT, agent="a", max_tokens=4)
        assert again.admitted.cached_tokens > 0, "its memory was on disk"


def test_budget_grows_back_stepwise_after_calm(tmp_path, model):
    with bench_of(tmp_path, model, hot_bytes=8 << 20) as bench:
        bench.level = Pressure.CRITICAL
        low_bytes = bench.step()

        bench.level = Pressure.NORMAL
        bench.clock.now_s += MEMORY_CALM_S - 1
        assert bench.step() == low_bytes
        bench.clock.now_s += 1
        assert bench.step() == low_bytes + (8 << 20) // MEMORY_SHRINK_PARTS
        for _ in range(MEMORY_SHRINK_PARTS):
            bench.step()
        assert bench.step() == 8 << 20, "the budget grows no further"


def test_arrays_over_the_nodes_share_count_as_a_warning(tmp_path, model):
    with bench_of(tmp_path, model, hot_bytes=8 << 20) as bench:
        assert bench.step() == 8 << 20

        bench.excess_bytes = 1
        assert bench.step() < 8 << 20
        assert bench.pressure.level is Pressure.WARNING


def test_sole_turn_may_exceed_the_reduced_budget(tmp_path, model):
    with bench_of(tmp_path, model, hot_bytes=ALONE_BYTES) as bench:
        bench.level = Pressure.CRITICAL
        for _ in range(MEMORY_SHRINK_PARTS):
            bench.step()
        limit_bytes = bench.step()
        reply = ask(bench.service, PROMPT, agent="long", max_tokens=8)

        needed_bytes = bench.node.resources.identity.spec.resident_bytes(
            reply.admitted.prompt_tokens
        )
        assert limit_bytes == ALONE_BYTES // MEMORY_FLOOR_PARTS < needed_bytes
