"""Prometheus metrics of nodes, as of their last heartbeats."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.control.node_calls import PRESSURES, THERMAL_STATES, NodeView
from fabric.ids import NodeName
from fabric.net.wire import FETCHING, SENDING, limit_names
from router.fleet.membership import LeaseState, Member, Membership
from router.placement.link_rates import best_by_kind

_SINCE: Final = "since the node's start"
# Numbers of a node's view: attribute, metric without prefix, and meaning.
_NUMBERS: Final = (
    ("agents", "node_agents", "Agents held, by node."),
    ("tokens", "node_tokens", "Tokens of those agents."),
    ("active", "node_active_turns", "Turns whose answers are decoded now."),
    ("waiting", "node_waiting_turns", "Turns that compute their prompts, or wait to."),
    ("queue_s", "node_queue_seconds", "Time to compute the prompts that it has accepted."),
    ("prefill_tokens_per_s", "node_prefill_tokens_per_second", "Measured speed of prefill."),
    (
        "decode_tokens_per_s",
        "node_decode_tokens_per_second",
        "Measured speed of decoding.",
    ),
    ("restore_bytes_per_s", "node_restore_bytes_per_second", "Measured speed of loads from disk."),
)
_COUNTS: Final = (
    ("evicted_agents", "evicted_agents", f"Agents evicted or expired {_SINCE}."),
    ("scrubbed_bytes", "scrubbed_bytes", f"Stored blocks read again in idle moments {_SINCE}."),
    ("damaged_blocks", "damaged_blocks", f"Blocks that failed a check {_SINCE}."),
    (
        "fenced_turns",
        "node_fenced_turns",
        f"Turns whose agent had another owner, {_SINCE}.",
    ),
    ("failed_rounds", "node_failed_rounds", f"Background work that failed {_SINCE}."),
    ("dropped_caches", "dropped_caches", f"Idle caches dropped from RAM for space {_SINCE}."),
    ("preempted_turns", "preempted_turns", f"Times that a turn was paused for another {_SINCE}."),
    ("failed_saves", "failed_saves", f"Saves of agents that the disk refused {_SINCE}."),
)
_MEMORY: Final = ("process", "arrays", "pool", "share", "weights", "machine", "swap")


class NodeGauges(Collector):
    """Metrics of all nodes; a lost node keeps its last values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics; they are empty until `membership` is set."""
        self.membership: Membership | None = None
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: they depend on the nodes, and no other collector has their names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics."""
        membership = self.membership
        if membership is None:
            return
        members = membership.members
        by_state = dict.fromkeys(LeaseState, 0)
        up = _gauge("node_up", "1 while the node's lease is alive.", "node")
        states = _gauge("node_state", "1 for the state that the node is in.", "node", "state")
        for member in members:
            health = membership.health(member.name)
            by_state[health] += 1
            up.add_metric([member.name], health is LeaseState.ALIVE)
            states.add_metric([member.name, membership.state_of(member)], 1)
        nodes = _gauge("nodes", "Nodes by the state of their lease.", "state")
        for state, count in by_state.items():
            nodes.add_metric([state.value], count)
        yield from (nodes, up, states)
        views = [(member.name, member.view) for member in members if member.view is not None]
        yield from _numbers(views)
        yield from _memory(views)
        yield from _facts(views)
        yield _transfers(members)
        yield from _links(membership)


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"macfabric_{name}", help_text, labels=labels)


Views = list[tuple[NodeName, NodeView]]


def _numbers(views: Views) -> Iterator[Metric]:
    kinds: tuple[tuple[Any, Any], ...] = (
        (GaugeMetricFamily, _NUMBERS),
        (CounterMetricFamily, _COUNTS),
    )
    for kind, listed in kinds:
        for attribute, name, help_text in listed:
            family = kind(f"macfabric_{name}", help_text, labels=["node"])
            for node, view in views:
                if (number := getattr(view, attribute)) is not None:
                    family.add_metric([node], number)
            yield family


def _memory(views: Views) -> Iterator[Metric]:
    hot = _gauge(
        "hot_bytes", "Memory for agents' caches: held, limit now, and total.", "node", "kind"
    )
    ram = _gauge("memory_bytes", "RAM of node and machine, by use.", "node", "kind")
    disk = _gauge("disk_bytes", "Agents' caches on disk: held, limit, free of it.", "node", "kind")
    drive = _gauge("drive_bytes", "The drive of the data folder: total, free.", "node", "kind")
    for node, view in views:
        limit, total = view.hot_limit_bytes, view.hot_total_bytes
        _add(hot, node, held=view.bytes.hot, limit=limit, total=total)
        free = view.free.disk if view.free is not None else None
        usage = view.usage
        _add(disk, node, held=view.bytes.disk, free=free)
        if usage is not None:
            _add(disk, node, limit=usage.disk_limit_bytes)
            _add(drive, node, total=usage.drive_bytes, free=usage.drive_free_bytes)
            _add(ram, node, **{kind: getattr(usage, f"{kind}_bytes") for kind in _MEMORY})
    yield from (hot, ram, disk, drive)


def _add(family: GaugeMetricFamily, node: NodeName, **numbers: int | None) -> None:
    for kind, number in numbers.items():
        if number is not None:
            family.add_metric([node, kind], number)


def _facts(views: Views) -> Iterator[Metric]:
    pressure = _gauge("memory_pressure", "0 normal, 1 warning, 2 critical.", "node")
    thermal = _gauge("thermal_state", "0 nominal, 1 fair, 2 serious, 3 critical.", "node")
    degraded = _gauge("node_degraded", "1 while a node has a problem; /v1/nodes names it.", "node")
    build = _gauge(
        "node_build_info", "Versions of the node's code and model.",
        *("node", "version", "mlx", "python", "protocol", "model", "fingerprint"),
    )  # fmt: skip
    ends = _gauge("certificate_expiry_timestamp_seconds", "When its certificate ends.", "node")
    exits = _gauge(
        "node_last_exit_timestamp_seconds", "When the previous process ended.", "node", "cause"
    )
    for node, view in views:
        pressure.add_metric([node], _index_of(view.memory_pressure, PRESSURES))
        thermal.add_metric([node], _index_of(view.thermal_state, THERMAL_STATES))
        degraded.add_metric([node], view.degraded is not None or not view.self_test.passed)
        known = view.build or {}
        versions = [known.get(name, "") for name in ("macfabric", "mlx", "python")]
        model = [view.model, view.fingerprint[:16]]
        build.add_metric([node, *versions, str(view.protocol or ""), *model], 1)
        if view.certificate_ends_s is not None:
            ends.add_metric([node], view.certificate_ends_s)
        if view.last_exit is not None:
            exits.add_metric([node, view.last_exit.cause], view.last_exit.at_s)
    yield from (pressure, thermal, degraded, build, ends, exits)


def _transfers(members: Iterable[Member]) -> Metric:
    family = CounterMetricFamily(
        "macfabric_transfer_events",
        f"Counters of the data plane {_SINCE}: bytes, parts, refusals, failures.",
        labels=["node", "side", "event"],
    )
    for member in members:
        if member.view is not None:
            sending, fetching = member.view.sending, member.view.fetching
            for side, counts, names in (("send", sending, SENDING), ("fetch", fetching, FETCHING)):
                for event, count in limit_names(counts, names).items():
                    family.add_metric([member.name, side, event], count)
    return family


def _links(membership: Membership) -> Iterator[Metric]:
    labels, best_of = ("node", "peer", "kind"), "over its best link of a kind."
    rtt = _gauge("link_rtt_seconds", f"Round trip to a peer {best_of}", *labels)
    rate = _gauge("link_bytes_per_second", f"Measured rate from a peer {best_of}", *labels)
    for member in membership.members:
        if member.view is None or not membership.is_up(member.name):
            continue
        for (peer, kind), best in best_by_kind(member.view.links).items():
            named = [member.name, peer, kind.value]
            if best.rtt_s is not None:
                rtt.add_metric(named, best.rtt_s)
            if best.bytes_per_s is not None:
                rate.add_metric(named, best.bytes_per_s)
    yield from (rtt, rate)


def _index_of(level: str, levels: tuple[str, ...]) -> int:
    return levels.index(level) if level in levels else 0
