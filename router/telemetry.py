"""Prometheus counters and histograms under `macfabric_`, with few and bounded labels.

Labels never name an agent or a prompt. They may name nodes, as there are few, and of tenants those
that the operator has named in the settings, up to a limit; all others are one.
"""

import platform
from asyncio import CancelledError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from fabric import PROTOCOL_VERSION, __version__
from fabric.errors import FabricError, OverloadedError, RejectedError, RetryLaterError
from fabric.turn.generation import Admitted, CacheTier, TurnTimes
from router.fleet.membership import Membership
from router.limits import REFUSAL_LABELS_MAX, TENANT_LABELS_MAX
from router.node_gauges import NodeGauges
from router.placement.decision import Terms

_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_TURN_BUCKETS_S = (0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_GAP_BUCKETS_S = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10)
_ESTIMATED_S_MIN = 0.05  # below, a ratio measures the network
_PLACEMENT_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_MOVE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample of each counter, which no query needs
OTHER_CODES = "other"
OTHER_TENANTS = "(other)"  # no tenant's name has brackets


class Telemetry:
    """Metrics of one router in a registry of its own, so that a process may run several."""

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        """Use the names of `tenants` as labels, up to a limit."""
        self._tenants = frozenset(islice(dict.fromkeys(tenants), TENANT_LABELS_MAX))
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self._requests = counter("macfabric_requests", "Turns by outcome.", ["outcome"])
        self._ttft = Histogram(
            "macfabric_ttft_seconds",
            "From the request to the first token, by the source of the cached part.",
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
        self._saved_s = counter(
            "macfabric_saved_seconds",
            "Seconds of prefill that cached tokens saved, minus those to fetch and load them.",
            ["tier"],
        )
        self._completion = counter("macfabric_completion_tokens", "Tokens generated.")
        self.takeovers = counter("macfabric_takeovers", "Agents taken over from lost nodes.")
        self._node_gauges = NodeGauges(self.registry)
        self._add_estimates()
        self._add_turn_times()
        self._add_http()
        self._add_routers()
        self._add_moves()
        self._add_recovery()

    def _add_queues(self) -> None:
        self.guesses = Counter(
            "macfabric_guessed_turns",
            "Agents loaded ahead of a turn that was expected next, by outcome.",
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
        self._refusals = Counter(
            "macfabric_refusals",
            "Turns that no node admitted, by the code of their error.",
            ["code"],
            registry=self.registry,
        )
        self._refusal_codes: set[str] = set()

    def _add_estimates(self) -> None:
        counter = partial(Counter, registry=self.registry)
        self._estimated = counter(
            "macfabric_estimated_seconds",
            "Seconds until first tokens as placement estimated them, by term.",
            ["term"],
        )
        self._waited = counter(
            "macfabric_first_token_seconds",
            "Actual seconds until first tokens: until admission, and from then on.",
            ["part"],
        )
        self._estimate_ratio = Histogram(
            "macfabric_ttft_estimate_ratio",
            "Actual over estimated time to first token, of turns that take 50 ms or more.",
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )
        self._placement_s = Histogram(
            "macfabric_placement_seconds",
            "Time to find a turn's node: its prompt's sketch looked up, and one decision.",
            buckets=_PLACEMENT_BUCKETS_S,
            registry=self.registry,
        )

    def _add_http(self) -> None:
        self._answers = Counter(
            "macfabric_http_responses",
            "Answers to HTTP requests, by the route's path, the method and the class of status.",
            ["route", "method", "class"],
            registry=self.registry,
        )
        self._certificate_ends_s = Gauge(
            "macfabric_router_certificate_expiry_timestamp_seconds",
            "End of the certificate shown to clients; 0: none.",
            registry=self.registry,
        )
        build = Gauge(
            "macfabric_router_build_info",
            "Version of the router's code, and its protocol with nodes.",
            ["version", "python", "protocol"],
            registry=self.registry,
        )
        build.labels(__version__, platform.python_version(), str(PROTOCOL_VERSION)).set(1)

    def _add_routers(self) -> None:
        gauge = partial(Gauge, registry=self.registry)
        self._router_active = gauge("macfabric_router_active", "1 while this router is active.")
        self._router_term = gauge("macfabric_router_term", "Highest term of any router; 0: none.")
        self._voters = gauge(
            "macfabric_router_voters",
            "Voters on routers' terms: expected, answering, needed; 0: the fabric has one router.",
            ["kind"],
        )

    def _add_turn_times(self) -> None:
        timed = partial(Histogram, registry=self.registry)
        self._turn_s = timed(
            "macfabric_turn_seconds",
            "From the request to the end of its answer.",
            buckets=_TURN_BUCKETS_S,
        )
        self._part_s = timed(
            "macfabric_turn_part_seconds",
            "Parts of turns: queue, move, prepare, fetch, load, prefill, decode, save.",
            ["part"],
            buckets=_TURN_BUCKETS_S,
        )
        self._token_gap_s = timed(
            "macfabric_token_gap_seconds",
            "Mean time between an answer's tokens.",
            buckets=_GAP_BUCKETS_S,
        )

    def _add_moves(self) -> None:
        counter = partial(Counter, registry=self.registry)
        timed = partial(Histogram, buckets=_MOVE_BUCKETS_S, registry=self.registry)
        self.migrations = counter("macfabric_migrations", "Moves by outcome.", ["outcome"])
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
        self.fenced = counter(
            "macfabric_fenced_turns",
            "Turns whose end was not acknowledged: another node owned the agent by then.",
        )
        self.recovery_rounds = counter(
            "macfabric_recovery_rounds", "Rounds that found agents in doubt."
        )
        self.resolved = counter(
            "macfabric_recovered_agents",
            "Agents in doubt that were settled: an old claim gave way, or a seal was decided.",
            ["how"],
        )
        self._expired_count = 0
        self._expired = counter(
            "macfabric_expired_leases", "Leases that ran out since the router's start."
        )
        self.late_erasures = counter(
            "macfabric_late_erasures",
            "Agents that a node removed when it came back, erased while it was away.",
        )

    def note_admission(self, event: Admitted) -> None:
        self._prompt.inc(event.prompt_tokens)
        if event.cache is not CacheTier.COLD:
            self._cached.labels(event.cache.value).inc(event.cached_tokens)
        self._fetched.inc(event.fetched_tokens or 0)

    def note_saving(self, tier: CacheTier, seconds: float) -> None:
        """Count the seconds by which reuse shortened a turn."""
        if tier is not CacheTier.COLD:
            self._saved_s.labels(tier.value).inc(seconds)

    def note_first_token(self, event: Admitted, seconds: float) -> None:
        self._ttft.labels(event.cache.value).observe(seconds)

    def note_estimate(self, terms: Terms, admitted_s: float, first_token_s: float) -> None:
        """Count the estimated terms of a turn, and the actual time to its first token."""
        parts = ("queue", terms.queue_s), ("bring", terms.bring_s), ("load", terms.load_s)
        for term, seconds in (*parts, ("prefill", terms.prefill_s)):
            self._estimated.labels(term).inc(seconds)
        self._waited.labels("admission").inc(max(0.0, admitted_s))
        self._waited.labels("prefill").inc(max(0.0, first_token_s - admitted_s))
        estimate_s = terms.first_token_s
        if estimate_s > 0 and max(estimate_s, first_token_s) >= _ESTIMATED_S_MIN:
            self._estimate_ratio.observe(first_token_s / estimate_s)

    def note_placement(self, seconds: float) -> None:
        """Note how long a decision of placement took."""
        self._placement_s.observe(seconds)

    def note_end(self, outcome: str, completion_tokens: int = 0) -> None:
        """Count a turn's end: ok, rejected, overloaded, unavailable, failed or cancelled."""
        self._requests.labels(outcome).inc()
        self._completion.inc(completion_tokens)

    def note_times(self, seconds: float, times: TurnTimes | None, completion_tokens: int) -> None:
        """Note how long a turn took, and each of its parts where they are known."""
        self._turn_s.observe(seconds)
        if times is None:
            return
        for name, spent_s in asdict(times).items():
            if name != "first_token_s":
                self._part_s.labels(name.removesuffix("_s")).observe(spent_s)
        if completion_tokens > 1 and times.decode_s:
            self._token_gap_s.observe(times.decode_s / (completion_tokens - 1))

    @contextmanager
    def waiting(self, tenant: str) -> Iterator[None]:
        """Count a turn that waits for a place at its node."""
        waiting = self._waiting.labels(self._label_of(tenant))
        waiting.inc()
        try:
            yield
        finally:
            waiting.dec()

    def note_refusal(self, tenant: str, error: BaseException) -> None:
        """Count a turn that no node admitted."""
        if isinstance(error, OverloadedError):
            self.note_end("overloaded")
            self._refused.labels(self._label_of(tenant)).inc()
        elif isinstance(error, RetryLaterError):
            self.note_end("unavailable")
        elif isinstance(error, RejectedError):
            self.note_end("rejected")
        elif isinstance(error, CancelledError):
            self.note_end("cancelled")
        elif isinstance(error, FabricError):
            self.note_end("failed")
        if isinstance(error, FabricError):
            self._refusals.labels(self._code_of(error)).inc()

    def _label_of(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else OTHER_TENANTS

    def _code_of(self, error: FabricError) -> str:
        """Return an error's code, or one for all that are beyond the limit of labels."""
        if error.code not in self._refusal_codes:
            if len(self._refusal_codes) >= REFUSAL_LABELS_MAX:
                return OTHER_CODES
            self._refusal_codes.add(error.code)
        return error.code

    def note_migration(self, moved_s: float, pause_s: float, sent_bytes: int) -> None:
        self.migrations.labels("committed").inc()
        self._migration_s.observe(moved_s)
        self._pause_s.observe(pause_s)
        self._migration_bytes.inc(sent_bytes)

    def note_copy(self, kind: str, sent_bytes: int, *, ok: bool) -> None:
        self._copies.labels(kind, "ok" if ok else "failed").inc()
        self._copy_bytes.labels(kind).inc(sent_bytes)

    def note_response(self, route: str, method: str, status_class: str) -> None:
        """Count an answer to an HTTP request."""
        self._answers.labels(route, method, status_class).inc()

    def note_certificate(self, ends_s: float | None) -> None:
        """Show when the certificate for clients expires, if that is known."""
        self._certificate_ends_s.set(ends_s or 0)

    def note_router(self, *, is_active: bool, expected: int, answering: int, needed: int) -> None:
        """Show whether this router is the active one, and the numbers of voters."""
        self._router_active.set(is_active)
        counts = {"expected": expected, "answering": answering, "needed": needed}
        for kind, count in counts.items():
            self._voters.labels(kind).set(count)

    def exposition(self, membership: Membership) -> bytes:
        """Render everything in Prometheus' text format."""
        views = (member.view for member in membership.members)
        granted = (view.router.term for view in views if view is not None and view.router)
        self._router_term.set(max(granted, default=0))
        self._expired.inc(membership.expired_count - self._expired_count)
        self._expired_count = membership.expired_count
        self._node_gauges.membership = membership
        return generate_latest(self.registry)
