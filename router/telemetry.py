"""Prometheus counters and histograms under `macfabric_`, with few and bounded labels.

Labels never name an agent or a prompt. They may name nodes, as there are few, and of tenants those
that the operator has named in the settings, up to a limit; all others are one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fabric.control.node_calls import PRESSURES, THERMAL_STATES, NodeView
from fabric.ids import NodeName
from fabric.net.wire import FETCHING, SENDING, bounded
from fabric.turn.generation import Admitted, CacheTier
from router.fleet.membership import LeaseState, Member, Membership
from router.limits import TENANT_LABELS_MAX
from router.placement.link_rates import best_by_kind
from router.placement.terms import Terms

_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)
_ESTIMATED_S_MIN = 0.05  # below, a ratio measures the network
_MOVE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
OTHER_TENANTS = "(other)"  # no tenant's name has brackets


class Telemetry:
    """Metrics of one router in a registry of its own, so that a process may run several."""

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        """Use the names of `tenants` as labels, up to a limit."""
        self._tenants = frozenset(islice(dict.fromkeys(tenants), TENANT_LABELS_MAX))
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self._requests = counter("macfabric_requests", "Turns by outcome.", ["outcome"])
        self._ttft = Histogram(
            "macfabric_ttft_seconds",
            "From the request to the first token, by where the cached part was.",
            ["cache"],
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._prompt = counter("macfabric_prompt_tokens", "Tokens of prompts.")
        self._cached = counter(
            "macfabric_cached_tokens",
            "Prompt tokens that were not computed again, by tier.",
            ["tier"],
        )
        self._completion = counter("macfabric_completion_tokens", "Tokens generated.")
        self._takeovers = counter("macfabric_takeovers", "Agents taken over from lost nodes.")
        self._router_active = gauge("macfabric_router_active", "1 while this router is active.")
        self._router_term = gauge("macfabric_router_term", "Highest term of any router; 0: none.")
        self._nodes = gauge("macfabric_nodes", "Nodes by the state of their lease.", ["state"])
        self._up = gauge("macfabric_node_up", "1 while the node's lease is alive.", ["node"])
        self._agents = gauge("macfabric_node_agents", "Agents held, by node.", ["node"])
        self._scrubbed = gauge(
            "macfabric_scrubbed_bytes",
            "Stored blocks read again in idle moments since the node's start.",
            ["node"],
        )
        self._damaged = gauge(
            "macfabric_damaged_blocks",
            "Blocks that failed a check and were taken out of use since the node's start.",
            ["node"],
        )
        self._hot_bytes = gauge(
            "macfabric_hot_bytes",
            "Memory for agents' caches: held, limit now, and total as planned.",
            ["node", "kind"],
        )
        self._pressure = gauge(
            "macfabric_memory_pressure",
            "How short the node's machine is of memory: 0 normal, 1 warning, 2 critical.",
            ["node"],
        )
        self._thermal = gauge(
            "macfabric_thermal_state",
            "How hot the node's machine is: 0 nominal, 1 fair, 2 serious, 3 critical.",
            ["node"],
        )
        self._rtt = gauge(
            "macfabric_link_rtt_seconds",
            "Round trip to a peer over its best link of a kind.",
            ["node", "peer", "kind"],
        )
        self._link_rate = gauge(
            "macfabric_link_bytes_per_second",
            "Measured rate from a peer over its best link of a kind.",
            ["node", "peer", "kind"],
        )
        self._transfers = gauge(
            "macfabric_transfer_events",
            "Counters of the data plane since the node's start: bytes, parts, refusals, failures.",
            ["node", "side", "event"],
        )
        self._add_estimates()
        self._add_moves()
        self._add_recovery()

    def _add_queues(self) -> None:
        self._guesses = Counter(
            "macfabric_guessed_turns",
            "Agents loaded for a turn that was expected next, by what came.",
            ["outcome"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "macfabric_waiting_turns",
            "Turns in the router's queues in front of nodes, by tenant.",
            ["tenant"],
            registry=self.registry,
        )
        self._refused = Counter(
            "macfabric_refused_turns",
            "Turns answered with 429, as a queue is full, by tenant.",
            ["tenant"],
            registry=self.registry,
        )

    def _add_estimates(self) -> None:
        counter = partial(Counter, registry=self.registry)
        self._estimated = counter(
            "macfabric_estimated_seconds",
            "Seconds until first tokens as placement estimated them, by term.",
            ["term"],
        )
        self._waited = counter(
            "macfabric_first_token_seconds",
            "Seconds until first tokens as they were: until admission, and from then on.",
            ["part"],
        )
        self._estimate_ratio = Histogram(
            "macfabric_ttft_estimate_ratio",
            "Actual over estimated time to first token, of turns that take 50 ms or more.",
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )

    def _add_moves(self) -> None:
        counter = partial(Counter, registry=self.registry)
        timed = partial(Histogram, buckets=_MOVE_BUCKETS_S, registry=self.registry)
        self._migrations = counter("macfabric_migrations", "Moves by outcome.", ["outcome"])
        self._migration_s = timed("macfabric_migration_seconds", "Duration of moves.")
        self._pause_s = timed("macfabric_migration_pause_seconds", "Time an agent was sealed.")
        self._migration_bytes = counter("macfabric_migration_bytes", "Bytes that moves sent.")
        self._copies = counter(
            "macfabric_copies",
            "Replicas, forks, prefetches and lent beginnings by outcome.",
            ["kind", "outcome"],
        )
        self._copy_bytes = counter("macfabric_copy_bytes", "Bytes that copies sent.", ["kind"])
        self._fetched = counter(
            "macfabric_fetched_tokens",
            "Prompt tokens that another node sent while their turn waited.",
        )

    def _add_recovery(self) -> None:
        self._add_queues()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self._fenced = counter(
            "macfabric_fenced_turns",
            "Turns whose end was not acknowledged: another node owned the agent by then.",
        )
        self._recovery = counter("macfabric_recovery_rounds", "Rounds that found agents in doubt.")
        self._resolved = counter(
            "macfabric_recovered_agents",
            "Agents in doubt that were settled: an old claim gave way, or a seal was decided.",
            ["how"],
        )
        self._expired = gauge("macfabric_expired_leases", "Leases that ran out since the start.")
        self._erased_late = counter(
            "macfabric_late_erasures",
            "Agents that a node removed when it came back, erased while it was away.",
        )
        self._node_fenced = gauge(
            "macfabric_node_fenced_turns",
            "Turns that a node itself ended because another owned the agent, since its start.",
            ["node"],
        )
        self._failed_rounds = gauge(
            "macfabric_node_failed_rounds",
            "Rounds of a node's background work that failed and were tried again, since its start.",
            ["node"],
        )

    def _set_transfers(self, member: Member) -> None:
        if member.view is None:
            return
        sides = (("send", member.view.sending, SENDING), ("fetch", member.view.fetching, FETCHING))
        for side, counts, names in sides:
            for event, count in bounded(counts, names).items():
                self._transfers.labels(member.name, side, event).set(count)

    def _set_links(self, membership: Membership) -> None:
        self._rtt.clear()
        self._link_rate.clear()
        for member in membership.members:
            if member.view is None or not membership.is_up(member.name):
                continue
            for (peer, kind), best in best_by_kind(member.view.links).items():
                labels = (member.name, peer, kind.value)
                if best.rtt_s is not None:
                    self._rtt.labels(*labels).set(best.rtt_s)
                if best.bytes_per_s is not None:
                    self._link_rate.labels(*labels).set(best.bytes_per_s)

    def admitted(self, event: Admitted) -> None:
        self._prompt.inc(event.prompt_tokens)
        if event.cache is not CacheTier.COLD:
            self._cached.labels(event.cache.value).inc(event.cached_tokens)
        self._fetched.inc(event.fetched_tokens or 0)

    def first_token(self, event: Admitted, seconds: float) -> None:
        self._ttft.labels(event.cache.value).observe(seconds)

    def estimated(self, terms: Terms, admitted_s: float, first_token_s: float) -> None:
        """Count what placement estimated of a turn, and what its first token took."""
        parts = ("queue", terms.queue_s), ("bring", terms.bring_s), ("load", terms.load_s)
        for term, seconds in (*parts, ("prefill", terms.prefill_s)):
            self._estimated.labels(term).inc(seconds)
        self._waited.labels("admission").inc(max(0.0, admitted_s))
        self._waited.labels("prefill").inc(max(0.0, first_token_s - admitted_s))
        estimate_s = terms.first_token_s
        if estimate_s > 0 and max(estimate_s, first_token_s) >= _ESTIMATED_S_MIN:
            self._estimate_ratio.observe(first_token_s / estimate_s)

    def ended(self, outcome: str, completion_tokens: int = 0) -> None:
        """Count a turn's end: ok, rejected, overloaded, unavailable, failed or cancelled."""
        self._requests.labels(outcome).inc()
        self._completion.inc(completion_tokens)

    @contextmanager
    def waiting(self, tenant: str) -> Iterator[None]:
        """Count a turn that waits for a place at its node."""
        waiting = self._waiting.labels(self._label_of(tenant))
        waiting.inc()
        try:
            yield
        finally:
            waiting.dec()

    def refused(self, tenant: str) -> None:
        """Count a turn that was refused because a queue is full."""
        self._refused.labels(self._label_of(tenant)).inc()

    def guessed(self, outcome: str) -> None:
        """Count a guess about the next turn of a group: right, wrong or refused."""
        self._guesses.labels(outcome).inc()

    def _label_of(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else OTHER_TENANTS

    def taken_over(self) -> None:
        self._takeovers.inc()

    def fenced(self) -> None:
        self._fenced.inc()

    def recovering(self) -> None:
        self._recovery.inc()

    def gave_way(self) -> None:
        """Count a claim that gave way to a later one."""
        self._resolved.labels("gave_way").inc()

    def decided(self) -> None:
        """Count a sealed agent that serves again."""
        self._resolved.labels("decided").inc()

    def erased_late(self, agents: int) -> None:
        self._erased_late.inc(agents)

    def migrated(self, moved_s: float, pause_s: float, sent_bytes: int) -> None:
        self._migrations.labels("committed").inc()
        self._migration_s.observe(moved_s)
        self._pause_s.observe(pause_s)
        self._migration_bytes.inc(sent_bytes)

    def copied(self, kind: str, sent_bytes: int, *, ok: bool) -> None:
        self._copies.labels(kind, "ok" if ok else "failed").inc()
        self._copy_bytes.labels(kind).inc(sent_bytes)

    def migration_failed(self) -> None:
        self._migrations.labels("aborted").inc()

    def _set_memory(self, name: NodeName, view: NodeView) -> None:
        for kind, count_bytes in (
            ("held", view.bytes.hot),
            ("limit", view.hot_limit_bytes),
            ("total", view.hot_total_bytes),
        ):
            self._hot_bytes.labels(name, kind).set(count_bytes)
        self._pressure.labels(name).set(_index_of(view.memory_pressure, PRESSURES))
        self._thermal.labels(name).set(_index_of(view.thermal_state, THERMAL_STATES))

    def note_router(self, *, is_active: bool) -> None:
        """Show whether this router is the active one."""
        self._router_active.set(is_active)

    def exposition(self, membership: Membership) -> bytes:
        """Render everything in Prometheus' text format."""
        views = (member.view for member in membership.members)
        granted = (view.router.term for view in views if view is not None and view.router)
        self._router_term.set(max(granted, default=0))
        by_state = dict.fromkeys(LeaseState, 0)
        for member in membership.members:
            health = membership.health(member.name)
            by_state[health] += 1
            self._up.labels(member.name).set(health is LeaseState.ALIVE)
            if member.view is not None:
                self._set_memory(member.name, member.view)
                self._agents.labels(member.name).set(member.view.agents)
                self._scrubbed.labels(member.name).set(member.view.scrubbed_bytes)
                self._damaged.labels(member.name).set(member.view.damaged_blocks)
                self._node_fenced.labels(member.name).set(member.view.fenced_turns)
                self._failed_rounds.labels(member.name).set(member.view.failed_rounds)
            self._set_transfers(member)
        self._expired.set(membership.expired_count)
        self._set_links(membership)
        for state, count in by_state.items():
            self._nodes.labels(state.value).set(count)
        return generate_latest(self.registry)


def _index_of(level: str, levels: tuple[str, ...]) -> int:
    return levels.index(level) if level in levels else 0
