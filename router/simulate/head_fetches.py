"""Fetches of prompts' beginnings between modelled nodes, while the turns wait for them.

    turn 1   asks its lender ─▶ stored blocks cross the link ─▶ asks for blocks computed since
    turn 2   the same beginning: waits for the fetch of turn 1
    both     queue without memory meanwhile, and use the blocks that have arrived

As real nodes do (`node/turn/fetched_heads.py`): a fetch that would take longer than computing, or
longer than it should, ends, and the turns compute the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from fabric.ids import NodeName
from router.limits import SIMULATED_FETCHES_MAX
from router.simulate.content import Extent
from router.simulate.engine import NodeTurn
from router.simulate.machine import Machine
from router.simulate.moves import START_S, Network
from router.simulate.timeline import Timeline

SLOW_FACTOR: Final = 3.0  # times the expected seconds of a part, plus SLOW_S: then the fetch ends
SLOW_S: Final = 0.1


@dataclass(slots=True, eq=False)
class _Fetch:
    """Transfer of a prompt's beginning from one node to another."""

    source: Machine
    target: Machine
    prompt: Extent
    begun_tokens: int  # on the target before the fetch
    end_tokens: int  # on the target now
    waiting: list[NodeTurn] = field(default_factory=list)
    listens: bool = False  # it waits until the source has computed more

    def common_tokens(self, job: NodeTurn) -> int:
        """Return how many tokens a prompt shares with the one that it was begun for."""
        return self.prompt.tokens_of(self.prompt.common_count(job.prompt))


class HeadFetches:
    """All fetches between the nodes of a run."""

    def __init__(
        self, timeline: Timeline, network: Network, machines: Mapping[NodeName, Machine]
    ) -> None:
        self.count = 0
        self._timeline = timeline
        self._network = network
        self._machines = machines
        self._to: dict[NodeName, list[_Fetch]] = {name: [] for name in machines}
        self._from: dict[NodeName, list[_Fetch]] = {name: [] for name in machines}
        for machine in machines.values():
            machine.on_arrival = partial(self._arrive, machine)
            machine.engine.on_published = partial(self._resume_fetches, machine)

    def _arrive(self, target: Machine, job: NodeTurn) -> None:
        """Let a turn wait for a fetch under way, or begin one from its lender."""
        joined = self._joinable(target, job)
        if joined is not None:
            joined.waiting.append(job)
            job.coming_tokens = joined.common_tokens(job)
            return
        source = self._machines.get(job.lender) if job.lender is not None else None
        if (
            source is None
            or source is target
            or len(self._to[target.name]) >= SIMULATED_FETCHES_MAX
        ):
            return
        had = job.cached_tokens
        fetch = _Fetch(source, target, job.prompt, had, had, [job])
        self._to[target.name].append(fetch)
        self._from[source.name].append(fetch)
        job.coming_tokens = job.prompt_tokens
        self._timeline.after(0.0, self._step, fetch)

    def _joinable(self, target: Machine, job: NodeTurn) -> _Fetch | None:
        """Return the fetch under way that shares most with a prompt, and more than it has."""
        best, most = None, job.cached_tokens
        for fetch in self._to[target.name]:
            common = fetch.common_tokens(job)
            if common > most:
                best, most = fetch, common
        return best

    def _resume_fetches(self, source: Machine) -> None:
        """Continue the fetches that wait for what a node computes; it may have been lost."""
        for fetch in tuple(self._from[source.name]):
            if fetch.listens:
                self._step(fetch)

    def _step(self, fetch: _Fetch) -> None:
        """Send what the source has stored, or wait for what it computes, or end."""
        source, target = fetch.source, fetch.target
        fetch.listens = False
        is_wanted = any(job.is_waiting and not job.is_gone for job in fetch.waiting)
        if not (source.is_up and target.is_up and is_wanted):
            self._end(fetch)
            return
        ready, coming = source.lendable(fetch.prompt)
        for job in fetch.waiting:
            job.coming_tokens = min(max(ready, coming), fetch.common_tokens(job))
        if ready > fetch.end_tokens:
            self._send(fetch, ready, max(ready, coming))
        elif coming > fetch.end_tokens:
            fetch.listens = True
        else:
            self._end(fetch)

    def _send(self, fetch: _Fetch, ready: int, all_tokens: int) -> None:
        source, target, had = fetch.source, fetch.target, fetch.end_tokens
        per_token, rate = target.cache.bytes_per_token, self._network.rate(source.name, target.name)
        fetch_s = (all_tokens - had) * per_token / rate
        if had == fetch.begun_tokens:
            fetch_s += START_S
        computing_s = (all_tokens - had) / target.engine.prefill_tokens_per_s(had)
        size_bytes = (ready - had) * per_token
        limit_s = SLOW_S + SLOW_FACTOR * size_bytes / rate
        waits_s = self._network.wait_s(source.name, target.name)
        if fetch_s >= computing_s or waits_s + START_S + size_bytes / rate > limit_s:
            self._end(fetch)
            return
        arrived = partial(self._note_arrival, fetch, ready)
        self._network.send(source.name, target.name, size_bytes, arrived)

    def _note_arrival(self, fetch: _Fetch, tokens: int) -> None:
        self.count += fetch.end_tokens == fetch.begun_tokens
        fetch.end_tokens = tokens
        count = fetch.prompt.count_within(tokens)
        fetch.target.cache.borrow(Extent(fetch.prompt.content, count), self._timeline.now_s)
        self._step(fetch)

    def _end(self, fetch: _Fetch) -> None:
        self._to[fetch.target.name].remove(fetch)
        self._from[fetch.source.name].remove(fetch)
        for job in fetch.waiting:
            job.coming_tokens = 0
        if fetch.target.is_up:
            fetch.target.engine.grant()
