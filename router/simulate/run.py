"""Run of a workload on a fleet under one policy, to its last answer."""

import gc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from router.simulate.baselines import Baseline
from router.simulate.catalog import find_policy
from router.simulate.dispatcher import Dispatcher
from router.simulate.faults import Fault, FaultPlan, misjudge
from router.simulate.fleet_file import FleetModel
from router.simulate.head_fetches import HeadFetches
from router.simulate.machine import Machine
from router.simulate.moves import Network
from router.simulate.router_side import RouterSide
from router.simulate.sessions import Arrival
from router.simulate.timeline import Timeline

PROGRESS_EVENTS = 20_000  # between two reports
STALLED_S = 86_400.0  # without an answer to a running turn: a fault of the simulator

Progress = Callable[[int, float], None]  # answered turns, simulated seconds


@dataclass(frozen=True, slots=True)
class Conditions:
    """Faults of a run, the same for all policies."""

    faults: tuple[Fault, ...] = ()
    wrong_speeds: tuple[float, float] | None = None
    slow_links: float = 1.0  # factor on the time of all transfers


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run."""

    policy: str
    seed: int
    turns: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    turn_mean_s: float  # to the last token
    cached_share: float  # of all prompts' tokens, reused instead of computed
    computed_tokens: int  # of prompts
    relocated_share: float  # of turns, on another node than their agent's turn before
    moves: int  # of agents with their memory
    moved_bytes: int
    retried: int  # after their node was lost
    simulated_s: float
    busy_share: float  # of all nodes' time until the last answer
    events: int

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name, rounded to what is certain."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items()}


class SimulatedRun:
    """Fleet, router and clients of one run."""

    def __init__(
        self,
        fleet: FleetModel,
        policy: str,
        seed: int,
        arrivals: Iterator[Arrival],
        conditions: Conditions | None = None,
    ) -> None:
        suffered = conditions or Conditions()
        self.timeline = Timeline()
        self._policy, self._seed = policy, seed
        self._arrivals = arrivals
        self._has_arrivals = True
        self._answered = (0, 0.0)  # turns, and when that was new
        self._heartbeat_s = fleet.heartbeat_s
        chosen = find_policy(policy)
        lends = chosen.lends_heads and fleet.lends_heads
        waits = chosen.waits_for_heads and fleet.shares_heads_in_flight
        fleet = replace(fleet, shares_heads_in_flight=waits, lends_heads=lends)
        machines = [Machine(self.timeline, node, fleet) for node in fleet.each()]
        if suffered.wrong_speeds is not None:
            misjudge(machines, suffered.wrong_speeds, seed)
        self.machines = {machine.name: machine for machine in machines}
        placement = chosen.placement()
        self.router = RouterSide(self.timeline, self.machines, placement)
        self.network = Network(self.timeline, {name: m.model for name, m in self.machines.items()})
        self.network.slowness = suffered.slow_links
        self.heads = HeadFetches(self.timeline, self.network, self.machines)
        self.dispatcher = Dispatcher(
            self.timeline,
            self.router,
            self.machines,
            self.network,
            placement if isinstance(placement, Baseline) else None,
            self._on_idle,
            follows_prompts=chosen.follows_prompts,
        )
        plan = FaultPlan(self.timeline, self.machines, self.router, self.dispatcher.moves)
        plan.schedule(suffered.faults)

    def play(self, progress: Progress | None = None) -> Outcome:
        """Run to the last answer; report progress periodically."""
        was_collecting = gc.isenabled()
        gc.disable()  # turns make no cycles, and looking for some takes a tenth of the time
        try:
            return self._play(progress)
        finally:
            if was_collecting:
                gc.enable()

    def _play(self, progress: Progress | None) -> Outcome:
        self.timeline.at(0.0, self._heartbeat)
        self._await_next()
        if not self._has_arrivals:
            self.timeline.stop()
        while not self.timeline.run(PROGRESS_EVENTS):
            if progress is not None:
                progress(self.dispatcher.counters.answered, self.timeline.now_s)
        if progress is not None:
            progress(self.dispatcher.counters.answered, self.timeline.now_s)
        return self._outcome()

    def _on_idle(self) -> None:
        if not self._has_arrivals:
            self.timeline.stop()

    def _heartbeat(self) -> None:
        self.router.send_heartbeats()
        counters, (answered, since_s) = self.dispatcher.counters, self._answered
        if counters.answered != answered or counters.answered == counters.asked:
            self._answered = (counters.answered, self.timeline.now_s)
        elif self.timeline.now_s - since_s > STALLED_S:
            message = f"{counters.asked - answered} simulated turns are never answered"
            raise AssertionError(message)
        self.timeline.after(self._heartbeat_s, self._heartbeat)

    def _await_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._has_arrivals = False
        else:
            self.timeline.at(arrival.at_s, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self.dispatcher.begin(arrival.session)
        self._await_next()

    def _outcome(self) -> Outcome:
        counters, machines = self.dispatcher.counters, self.machines.values()
        times = _times(counters.ttft_s)
        simulated_s = self.timeline.now_s
        reused = sum(machine.engine.reused_tokens for machine in machines)
        computed = sum(machine.engine.computed_tokens for machine in machines)
        busy_s = sum(machine.engine.busy_s for machine in machines)
        p50, p95, p99 = (float(np.percentile(times, each)) for each in (50, 95, 99))
        return Outcome(
            policy=self._policy,
            seed=self._seed,
            turns=counters.answered,
            ttft_mean_s=float(times.mean()),
            ttft_p50_s=p50,
            ttft_p95_s=p95,
            ttft_p99_s=p99,
            turn_mean_s=counters.turns_s / max(1, counters.answered),
            cached_share=reused / max(1, reused + computed),
            computed_tokens=computed,
            relocated_share=counters.relocated / max(1, counters.answered),
            moves=self.dispatcher.moves.count,
            moved_bytes=self.network.sent_bytes,
            retried=counters.retried,
            simulated_s=simulated_s,
            busy_share=busy_s / max(1e-9, simulated_s * len(self.machines)),
            events=self.timeline.events_count,
        )


def _times(ttft_s: "array[float]") -> Any:
    """Return the times as an array; one zero if there were no turns."""
    return np.frombuffer(ttft_s, dtype=np.float64) if ttft_s else np.zeros(1)
